"""From records to `Results`: checked, scored, compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from moopd.config import Scale, StatisticsConfig
from moopd.evaluation import protocol
from moopd.evaluation.attempts import QuestionSet, arrange, question_set, split_systems
from moopd.evaluation.cases import case_book
from moopd.evaluation.differences import completion_bounds, paired_differences
from moopd.evaluation.numbers import Numbers, system_result
from moopd.evaluation.records import RecordsError
from moopd.evaluation.results import CaseBook, CurvePoint, Provenance, Results, RunProvenance
from moopd.evaluation.rows import Row, rows_in_order
from moopd.evaluation.scoring import FlexibleRules, Scored, load_rules, score
from moopd.systems import System
from moopd.types import Question

Questions = Sequence[Question] | Mapping[int, Sequence[Question]]
"""One list for all runs, or a list per run where every run was evaluated on its own questions."""


@dataclass(frozen=True)
class RecordsInput:
    """Records of one or more systems and runs (records.SCHEMA), and where they came from."""

    table: pa.Table
    provenance: RunProvenance = field(default_factory=RunProvenance)


def analyse(
    inputs: Sequence[RecordsInput],
    questions: Questions,
    systems: Mapping[str, System],
    statistics: StatisticsConfig,
    *,
    provenance: Provenance | None = None,
    curves: Sequence[CurvePoint] = (),
    scale: Scale | None = None,
    num_attempts: int = 4,
    rules: FlexibleRules | None = None,
) -> Results:
    """Every number of the report. `systems` are the rows of systems.yaml; records under other names
    are taken as they are.

    Raises RecordsError for records that do not fit the questions, or a system and run given twice.
    """
    found, of_run = _read(inputs, questions, num_attempts, rules or load_rules())
    rows = rows_in_order(found, systems)
    runs = {row.name: found[row.name] for row in rows}
    reference = statistics.reference if statistics.reference in runs else rows[0].name
    numbers = Numbers(runs, statistics)
    shared = provenance or Provenance()
    sets = _set_sizes(runs[reference])
    return Results(
        scale=scale.name if scale else "records",
        description=scale.description if scale else "",
        caution=scale.caution if scale else "",
        reference=reference,
        num_attempts=num_attempts,
        num_draws=statistics.num_draws,
        confidence=statistics.confidence,
        seed=statistics.seed,
        sets=sets,
        systems=tuple(system_result(row, numbers, scale) for row in rows),
        differences=paired_differences(rows, numbers.scores, reference, statistics),
        completion=completion_bounds(
            runs, numbers.completed, numbers.scores, reference, statistics
        ),
        curves=tuple(curves),
        cases=_cases(runs, reference, rows, statistics.num_cases),
        deviations=protocol.deviations(scale) if scale else (),
        open_choices=protocol.open_choices(scale, systems.values(), sets) if scale else (),
        readings=protocol.READINGS if scale else (),
        limits=protocol.LIMITS,
        provenance=shared.model_copy(update={"runs": {**of_run, **shared.runs}}),
    )


def curve_points(
    system: str, run: int, history: Sequence[Mapping[str, float]], prefix: str = "dev/"
) -> list[CurvePoint]:
    """The metrics under `prefix` of a training history, as points of the training curves."""
    return [
        CurvePoint(
            system=system,
            run=run,
            step=int(entry["step"]),
            metric=name.removeprefix(prefix),
            value=float(value),
        )
        for entry in history
        for name, value in sorted(entry.items())
        if name.startswith(prefix)
    ]


def _read(
    inputs: Sequence[RecordsInput], questions: Questions, num_attempts: int, rules: FlexibleRules
) -> tuple[dict[str, dict[int, Scored]], dict[str, RunProvenance]]:
    sets: dict[int, QuestionSet] = {}
    runs: dict[str, dict[int, Scored]] = {}
    provenance: dict[str, RunProvenance] = {}
    for given in inputs:
        for (system, run), table in split_systems(given.table).items():
            if run in runs.get(system, {}):
                raise RecordsError(f"records of {system}, run {run} are given twice; give one file")
            if run not in sets:
                sets[run] = _questions_of(questions, run, sets)
            attempts = arrange(table, sets[run], num_attempts)
            runs.setdefault(system, {})[run] = score(attempts, rules)
            own = given.provenance.model_copy(update={"protocol": attempts.protocol})
            provenance[f"{system}/{run}"] = own
    if not runs:
        raise RecordsError("no records; expected at least one system")
    return runs, provenance


def _questions_of(questions: Questions, run: int, known: Mapping[int, QuestionSet]) -> QuestionSet:
    if not isinstance(questions, Mapping):
        return next(iter(known.values()), None) or question_set(questions)
    if run not in questions:
        raise RecordsError(f"no questions for run {run}; got those of runs {sorted(questions)}")
    return question_set(questions[run])


def _set_sizes(of_system: Mapping[int, Scored]) -> dict[str, int]:
    sets = of_system[min(of_system)].attempts.questions.sets
    return {name: part.stop - part.start for name, part in sets.items()}


def _cases(
    runs: Mapping[str, Mapping[int, Scored]], reference: str, rows: Sequence[Row], num_cases: int
) -> CaseBook:
    """The first run of every row; the rival is the best other main row of the reference."""
    first = {name: of_system[min(of_system)] for name, of_system in runs.items()}
    system = next(row.system for row in rows if row.name == reference)
    rivals = [
        row.name
        for row in rows
        if row.name != reference
        and not row.is_ablation
        and (row.system is None or row.system is not system)
        and first[row.name].attempts.questions.ids == first[reference].attempts.questions.ids
    ]
    if not num_cases or not rivals:
        return CaseBook(rule="no cases: they need a second system on the same questions")
    rival = max(rivals, key=lambda name: int(first[name].strict.correct.sum()))
    titles = {row.name: row.title for row in rows}
    return case_book(first, titles, reference, rival, num_cases)
