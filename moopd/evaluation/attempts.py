"""The records of one system and run, checked against the questions and put in canonical order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from moopd.evaluation.records import COUNTS, RecordsError
from moopd.types import DATASETS, Question

_SHOWN = 8
"""Ids named per fault in a message; all of them are in the error's `ids`."""


@dataclass(frozen=True)
class QuestionSet:
    """Questions by set in the paper's order, then by id: the order of every array below."""

    questions: tuple[Question, ...]
    sets: dict[str, slice]

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(question.id for question in self.questions)

    def __len__(self) -> int:
        return len(self.questions)


@dataclass(frozen=True)
class Attempts:
    """What one system did: flat lists hold question after question, attempt after attempt.

    `counts` (Q, A) float64 per column of `COUNTS`; a column that the file lacks is not there.
    """

    system: str
    run: int
    protocol: str
    questions: QuestionSet
    num_attempts: int
    outputs: tuple[str, ...]
    stops: tuple[str | None, ...]
    counts: dict[str, NDArray[np.float64]]
    format_failures: tuple[str | None, ...]
    traces: tuple[str | None, ...] | None

    @property
    def num_records(self) -> int:
        return len(self.outputs)

    def iter_traces(self) -> Iterator[dict[str, Any]]:
        """One trace per record, decoded on the way. Raises RecordsError where there is none."""
        for number, text in enumerate(self.traces or ()):
            trace = json.loads(text) if text else {}
            if not isinstance(trace, dict) or not trace:
                question = self.questions.questions[number // self.num_attempts]
                raise RecordsError(
                    f"{self.system}: question {question.id!r} has a record without a trace while "
                    "others have one; expected all or none",
                    [question.id],
                )
            yield trace


def question_set(questions: Iterable[Question]) -> QuestionSet:
    """Canonical order. Raises RecordsError for a repeated id or an empty list."""
    known = {name: place for place, name in enumerate(DATASETS)}
    ordered = sorted(questions, key=lambda q: (known.get(q.dataset, len(known)), q.dataset, q.id))
    if not ordered:
        raise RecordsError("no questions; expected the test questions that the records are about")
    repeated = [name for name, n in Counter(q.id for q in ordered).items() if n > 1]
    if repeated:
        raise RecordsError(f"question ids are repeated: {_some(repeated)}", repeated)
    sets: dict[str, slice] = {}
    for place, question in enumerate(ordered):
        start = sets[question.dataset].start if question.dataset in sets else place
        sets[question.dataset] = slice(start, place + 1)
    return QuestionSet(tuple(ordered), sets)


def split_systems(table: pa.Table) -> dict[tuple[str, int], pa.Table]:
    """(system, run) -> its rows; a missing run counts as 0. Order: first appearance of a system."""
    runs = pc.fill_null(table["run"], 0)
    table = table.set_column(table.schema.get_field_index("run"), "run", runs)
    pairs = dict.fromkeys(zip(table["system"].to_pylist(), table["run"].to_pylist(), strict=True))
    return {
        (system, run): table.filter(
            pc.and_(pc.equal(table["system"], system), pc.equal(table["run"], run))
        )
        for system, run in pairs
    }


def arrange(table: pa.Table, questions: QuestionSet, num_attempts: int = 4) -> Attempts:
    """The records of one (system, run) in canonical order.

    Raises RecordsError naming the ids of unknown questions, wrong sets, missing, extra and
    duplicated attempts, attempts that share a seed, and a second protocol.
    """
    parts = split_systems(table)
    if len(parts) != 1:
        raise RecordsError(f"got records of {sorted(parts)}; expected one system and run")
    (system, run), table = next(iter(parts.items()))
    places = {name: place for place, name in enumerate(questions.ids)}
    ids = table["question_id"].to_pylist()
    attempts = table["attempt"].to_pylist()
    faults = _Faults(f"{system}, run {run}")
    _check_questions(table, ids, places, questions, faults)
    _check_attempts(ids, attempts, places, num_attempts, faults)
    _check_seeds(ids, table["seed"].to_pylist(), faults)
    protocol = _protocol(table, ids, faults)
    faults.raise_any()
    rows = np.empty(len(ids), dtype=np.int64)
    for row, (name, attempt) in enumerate(zip(ids, attempts, strict=True)):
        rows[places[name] * num_attempts + attempt] = row
    return _attempts(table.take(pa.array(rows)), system, run, protocol, questions, num_attempts)


def _attempts(
    table: pa.Table,
    system: str,
    run: int,
    protocol: str,
    questions: QuestionSet,
    num_attempts: int,
) -> Attempts:
    shape = (len(questions), num_attempts)
    counts = {}
    for name in COUNTS:
        column = table[name].combine_chunks()
        if column.null_count == len(column):
            continue
        if column.null_count:
            gone = column.is_null().to_pylist()
            ids = [i for i, g in zip(table["question_id"].to_pylist(), gone, strict=True) if g]
            raise RecordsError(
                f"{system}: {name} is empty in {len(ids)} of {len(gone)} records ({_some(ids)}); "
                "expected all or none",
                ids,
            )
        counts[name] = column.to_numpy(zero_copy_only=False).astype(np.float64).reshape(shape)
    traces = tuple(table["trace"].to_pylist())
    return Attempts(
        system=system,
        run=run,
        protocol=protocol,
        questions=questions,
        num_attempts=num_attempts,
        outputs=tuple(table["output"].to_pylist()),
        stops=tuple(table["stop"].to_pylist()),
        counts=counts,
        format_failures=tuple(table["format_failures"].to_pylist()),
        traces=traces if any(text and text != "{}" for text in traces) else None,
    )


class _Faults:
    """Collects every fault of a file, so that one refusal names them all."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._messages: list[str] = []
        self._ids: dict[str, None] = {}

    def add(self, what: str, ids: Sequence[str]) -> None:
        if ids:
            self._messages.append(f"{what}: {_some(ids)}")
            self._ids.update(dict.fromkeys(ids))

    def raise_any(self) -> None:
        if self._messages:
            raise RecordsError(f"{self._where}: " + "; ".join(self._messages), list(self._ids))


def _check_questions(
    table: pa.Table,
    ids: Sequence[str],
    places: dict[str, int],
    questions: QuestionSet,
    faults: _Faults,
) -> None:
    faults.add("unknown questions", _unique(name for name in ids if name not in places))
    datasets = table["dataset"].to_pylist()
    wrong = [
        f"{name} ({dataset}, expected {questions.questions[places[name]].dataset})"
        for name, dataset in zip(ids, datasets, strict=True)
        if dataset is not None
        and name in places
        and dataset != questions.questions[places[name]].dataset
    ]
    faults.add("set differs from the questions file", _unique(wrong))


def _check_attempts(
    ids: Sequence[str],
    attempts: Sequence[int],
    places: dict[str, int],
    num_attempts: int,
    faults: _Faults,
) -> None:
    seen = Counter(zip(ids, attempts, strict=True))
    wanted = range(num_attempts)
    duplicated = [f"{name} attempt {a} x{n}" for (name, a), n in seen.items() if n > 1]
    extra = [f"{name} attempt {a}" for name, a in seen if a not in wanted]
    missing = [f"{name} attempt {a}" for name in places for a in wanted if (name, a) not in seen]
    faults.add("duplicated records", duplicated)
    faults.add(f"extra attempts (expected 0 to {num_attempts - 1})", extra)
    faults.add("missing attempts", missing)


def _check_seeds(ids: Sequence[str], seeds: Sequence[int | None], faults: _Faults) -> None:
    if not any(seeds):
        return
    repeated = [name for (name, _), n in Counter(zip(ids, seeds, strict=True)).items() if n > 1]
    faults.add("attempts share a seed, so they are not independent", _unique(repeated))


def _protocol(table: pa.Table, ids: Sequence[str], faults: _Faults) -> str:
    protocols = [text or "" for text in table["protocol"].to_pylist()]
    main = Counter(protocols).most_common(1)[0][0] if protocols else ""
    others = _unique(
        f"{name} ({text[:12] or 'none'})"
        for name, text in zip(ids, protocols, strict=True)
        if text != main
    )
    faults.add(f"two protocols, most records have {main[:12] or 'none'}, not so", others)
    return main


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
