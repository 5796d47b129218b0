"""A trajectory as verl's rows, one per completion, and back to what credit needs.

A row carries plain values only (they travel through verl's queue). Every row of a workflow holds
the workflow's rewards and behaviour, because the trainer meets rows in any order.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moopd.rl.advantages import CreditRow
from moopd.rl.rewards import WorkflowCredit, team_outcome, workflow_credit
from moopd.systems import SearcherSignal
from moopd.trainers.behaviour import behaviour
from moopd.types import Judgement, Owner, Role, TrainingSample, Trajectory

NO_CALL = -1
"""Call number of the row that stands for a workflow which ended before its first call."""


@dataclass(frozen=True, slots=True)
class VerlRow:
    """One completion as verl trains it. `trained` is False where there is no token to train."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    trained: bool
    meta: dict[str, Any]
    outcome: float
    measures: dict[str, float]


def rows_of(
    trajectory: Trajectory,
    signal: SearcherSignal,
    filler: int,
    judgements: Mapping[int, Judgement | None] | None = None,
    error: str | None = None,
) -> list[VerlRow]:
    """Every completion of a workflow; at least one row, also for a workflow without a call.

    `filler`: token id that stands where verl needs a token and there is none.
    """
    workflow = _workflow_values(trajectory, signal, judgements, error)
    outcome = team_outcome(trajectory)
    measures = behaviour([trajectory])
    rows = [
        VerlRow(
            prompt_ids=call.prompt_ids,
            token_ids=completion.token_ids or (filler,),
            logprobs=completion.logprobs or (0.0,),
            trained=bool(completion.token_ids),
            meta={
                "call": call.index,
                "candidate": candidate,
                "role": call.role.value,
                "subtask": call.subtask,
                "workflow": workflow,
            },
            outcome=outcome,
            measures=measures,
        )
        for call in trajectory.calls
        for candidate, completion in enumerate(call.completions)
    ]
    return rows or [_placeholder(filler, workflow, outcome, measures)]


def broken_row(question: str, member: int, filler: int, error: str) -> VerlRow:
    """Stands for a workflow of which nothing is known but why it failed."""
    workflow = {
        "question": question,
        "member": member,
        "credit": None,
        "error": error,
        "verdicts": [],
        "num_retrievals": 0,
        "num_failed_retrievals": 0,
        "retrieval_error": None,
    }
    return _placeholder(filler, workflow, 0.0, {})


def _placeholder(
    filler: int, workflow: dict[str, Any], outcome: float, measures: dict[str, float]
) -> VerlRow:
    meta = {
        "call": NO_CALL,
        "candidate": 0,
        "role": Role.LEADER.value,
        "subtask": None,
        "workflow": workflow,
    }
    return VerlRow((filler,), (filler,), (0.0,), False, meta, outcome, measures)


def _workflow_values(
    trajectory: Trajectory,
    signal: SearcherSignal,
    judgements: Mapping[int, Judgement | None] | None,
    error: str | None,
) -> dict[str, Any]:
    # A workflow that the engine broke off has subtasks whose reports nobody judged.
    credit = None if error else asdict(workflow_credit(trajectory, signal, judgements))
    failed = [r.error for r in trajectory.retrievals if r.error is not None]
    return {
        "question": trajectory.question.id,
        "member": trajectory.group_index,
        "credit": credit,
        "error": error,
        "verdicts": _verdicts(judgements or {}),
        "num_retrievals": len(trajectory.retrievals),
        "num_failed_retrievals": len(failed),
        "retrieval_error": failed[0] if failed else None,
    }


def _verdicts(judgements: Mapping[int, Judgement | None]) -> list[list[float | None]]:
    """[subtask, score] of every judged report; the score is None where no verdict came."""
    return [
        [subtask, None if verdict is None else float(verdict.score)]
        for subtask, verdict in sorted(judgements.items())
    ]


def workflow_key(meta: Mapping[str, Any]) -> tuple[str, int]:
    return meta["workflow"]["question"], meta["workflow"]["member"]


def distinct_workflows(metas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The workflow values of a batch, each workflow once, in order of first appearance."""
    return list({workflow_key(meta): meta["workflow"] for meta in metas}.values())


def credit_of(workflow: Mapping[str, Any]) -> WorkflowCredit:
    values = workflow["credit"]
    return WorkflowCredit(
        **{
            **values,
            "subtasks": tuple(values["subtasks"]),
            "answers": tuple(values["answers"]),
        }
    )


def credit_row(
    meta: Mapping[str, Any],
    old: tuple[float, ...],
    opd: tuple[float, ...] | None,
    kl: tuple[float, ...] | None,
) -> CreditRow:
    return CreditRow(owner_of(meta), meta["subtask"], old, opd, kl)


def owner_of(meta: Mapping[str, Any]) -> Owner:
    question, member = workflow_key(meta)
    return Owner(question, member, meta["call"], meta["candidate"], Role(meta["role"]))


def write_samples(work: Path, step: int, samples: Sequence[TrainingSample]) -> None:
    """What a step trained on, one JSON object a line, under `work/rows`."""
    _write_lines(work, f"{step:06d}", map(asdict, samples))


def read_samples(work: Path, step: int) -> list[TrainingSample]:
    """The inverse of `write_samples`."""
    return [_sample(values) for values in _read_lines(work, f"{step:06d}")]


def write_workflows(work: Path, step: int, metas: Sequence[Mapping[str, Any]]) -> None:
    """Rewards and verdicts of a step's workflows, beside its samples."""
    _write_lines(work, f"{step:06d}_workflows", distinct_workflows(metas))


def read_workflows(work: Path, step: int) -> list[dict[str, Any]]:
    """The inverse of `write_workflows`."""
    return _read_lines(work, f"{step:06d}_workflows")


def _write_lines(work: Path, name: str, values: Iterable[Mapping[str, Any]]) -> None:
    folder = work / "rows"
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as stream:
        stream.writelines(json.dumps(value) + "\n" for value in values)


def _read_lines(work: Path, name: str) -> list[dict[str, Any]]:
    with gzip.open(work / "rows" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]


def _sample(values: dict[str, Any]) -> TrainingSample:
    owner = Owner(**{**values["owner"], "role": Role(values["owner"]["role"])})
    names = ("prompt_ids", "token_ids", "old_logprobs", "advantages")
    return TrainingSample(owner, *(tuple(values[name]) for name in names))
