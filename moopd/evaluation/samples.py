"""Columns of many systems and runs, resampled together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moopd.config import StatisticsConfig
from moopd.evaluation.attempts import QuestionSet
from moopd.evaluation.bootstrap import Sampled, bootstrap, mean_of_runs
from moopd.evaluation.metrics import Column
from moopd.evaluation.scoring import Scored
from moopd.types import Question

Columns = Mapping[str, Column]
Runs = Mapping[str, Mapping[int, Scored]]
"""System -> run -> its scored attempts."""


@dataclass(frozen=True)
class Regrouped:
    """The same questions under other set names: `order` takes a column to its new order."""

    questions: QuestionSet
    order: np.ndarray


def by_run(
    runs: Runs, columns_of: Callable[[Scored], Columns], config: StatisticsConfig
) -> dict[str, dict[str, dict[int, Sampled]]]:
    """system -> column -> run -> sampled; one matrix product per distinct question set."""
    result: dict[str, dict[str, dict[int, Sampled]]] = {name: {} for name in runs}
    for members in _by_questions(runs).values():
        columns = {
            (system, run, name): column
            for system, run, scored in members
            for name, column in columns_of(scored).items()
        }
        questions = members[0][2].attempts.questions
        for (system, run, name), sampled in bootstrap(columns, questions, config).items():
            result[system].setdefault(name, {})[run] = sampled
    return result


def pooled(
    runs: Runs,
    columns_of: Callable[[Scored], Columns],
    config: StatisticsConfig,
    regroup: Callable[[QuestionSet], Regrouped] | None = None,
) -> dict[str, dict[str, Sampled]]:
    """system -> column -> mean over its runs; a column must be there in every run to be kept."""
    parts: dict[str, dict[str, list[Sampled]]] = {name: {} for name in runs}
    for members in _by_questions(runs).values():
        groups: dict[tuple[str, str], list[Column]] = {}
        for system, _, scored in members:
            for name, column in columns_of(scored).items():
                groups.setdefault((system, name), []).append(column)
        questions = members[0][2].attempts.questions
        again = regroup(questions) if regroup else None
        columns = {key: _summed(of_runs, again) for key, of_runs in groups.items()}
        sampled = bootstrap(columns, again.questions if again else questions, config)
        for (system, name), of_runs in groups.items():
            # A question set with several runs counts once per run in the mean.
            parts[system].setdefault(name, []).extend([sampled[(system, name)]] * len(of_runs))
    return {
        system: {
            name: mean_of_runs(samples)
            for name, samples in columns_.items()
            if len(samples) == len(runs[system])
        }
        for system, columns_ in parts.items()
    }


def regrouped(questions: QuestionSet, group_of: Callable[[Question], str]) -> Regrouped:
    """Questions by `group_of`, groups in sorted order; those with an empty group are left out."""
    named = [(group_of(q), q.id, place) for place, q in enumerate(questions.questions)]
    ordered = sorted(item for item in named if item[0])
    order = np.array([place for _, _, place in ordered], dtype=np.int64)
    sets: dict[str, slice] = {}
    for place, (group, _, _) in enumerate(ordered):
        start = sets[group].start if group in sets else place
        sets[group] = slice(start, place + 1)
    return Regrouped(QuestionSet(tuple(questions.questions[place] for place in order), sets), order)


def _summed(of_runs: Sequence[Column], again: Regrouped | None) -> Column:
    values = sum((column.values for column in of_runs[1:]), start=of_runs[0].values)
    divisor = of_runs[0].divisor * len(of_runs)
    return Column(values[again.order] if again else values, divisor)


def _by_questions(runs: Runs) -> dict[tuple[str, ...], list[tuple[str, int, Scored]]]:
    groups: dict[tuple[str, ...], list[tuple[str, int, Scored]]] = {}
    for system, of_system in runs.items():
        for run, scored in sorted(of_system.items()):
            groups.setdefault(scored.attempts.questions.ids, []).append((system, run, scored))
    return groups
