"""Rows of a batch -> advantage per token, by the function that the torch trainer uses too.

Checks come first: a batch with a workflow that the engine broke off, or with too many failed
retrievals, is refused as a whole, so that no group is trained without one of its members.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from moopd.engines.base import EngineError
from moopd.retrieval.base import RetrievalError
from moopd.rl.advantages import CreditConfig, assign_advantages
from moopd.rl.rewards import WorkflowCredit
from moopd.trainers.verl_plugin.rows import (
    NO_CALL,
    credit_of,
    credit_row,
    distinct_workflows,
)
from moopd.trainers.verl_plugin.spec import VerlRun
from moopd.types import Role

Logprobs = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row with log-probabilities of its sampled tokens (empty where it has none to train)."""

    meta: Mapping[str, Any]
    old: Logprobs
    rollout: Logprobs
    reference: Logprobs | None = None
    """Under `VerlRun.reference_teacher`."""
    second: Logprobs | None = None
    """Under `VerlRun.second_teacher`."""


@dataclass(frozen=True, slots=True)
class Credited:
    advantages: tuple[Logprobs | None, ...]
    """One tuple per row, aligned with its tokens; None where the row must leave the loss."""
    metrics: dict[str, float]


class EngineMismatchError(RuntimeError):
    """Rollout engine and trainer disagree too much about the sampled tokens."""


def credit_config(run: VerlRun) -> CreditConfig:
    training = run.training
    return CreditConfig(
        group_size=training.group_size,
        beta=training.beta,
        kl_coef=training.kl_coef,
        kl_placement=training.kl_placement,
        advantage_scope=training.advantage_scope,
    )


def credit_batch(rows: Sequence[ScoredRow], run: VerlRun) -> Credited:
    """Advantages of all rows of one step, and its metrics (credit/..., named as in torch)."""
    workflows = distinct_workflows([row.meta for row in rows])
    check_workflows(workflows, run.max_retrieval_error_share)
    mismatch = _check_mismatch(rows, run.training.max_mismatch)
    credits = [credit_of(workflow) for workflow in workflows]
    numbers = [n for n, row in enumerate(rows) if row.meta["call"] != NO_CALL]
    credit_rows = [_credit_row(rows[n], run) for n in numbers]
    found = assign_advantages(credit_rows, credits, run.row, credit_config(run))
    advantages: list[Logprobs | None] = [None] * len(rows)
    for number, advantage in zip(numbers, found, strict=True):
        advantages[number] = advantage
    metrics = {
        "credit/rollout_mismatch": mismatch,
        "credit/trained_share": _mean(float(a is not None) for a in found),
        **_reward_metrics(credits),
        **_log_ratio_metric(rows, run),
    }
    return Credited(tuple(advantages), metrics)


def _credit_row(row: ScoredRow, run: VerlRun) -> Any:
    searcher = row.meta["role"] == Role.SEARCHER
    opd = row.second if run.second_teacher is not None else row.reference
    return credit_row(
        row.meta,
        row.old,
        opd if searcher and run.row.opd_teacher is not None else None,
        row.reference if not searcher and run.row.kl_teacher is not None else None,
    )


def check_workflows(workflows: Sequence[Mapping[str, Any]], max_retrieval_errors: float) -> None:
    """Raises EngineError (also for a judge that is gone) or RetrievalError for a batch that must
    not be trained."""
    broken = [w for w in workflows if w["error"] is not None]
    if broken:
        raise EngineError(
            f"{len(broken)} of {len(workflows)} workflows were broken off, expected none; first "
            f"cause: {broken[0]['error']}. The last checkpoint is intact: start the stage again"
        )
    total = sum(w["num_retrievals"] for w in workflows)
    failed = sum(w["num_failed_retrievals"] for w in workflows)
    if total and failed / total > max_retrieval_errors:
        cause = next(w["retrieval_error"] for w in workflows if w["num_failed_retrievals"])
        raise RetrievalError(
            f"{failed} of {total} retrievals failed, at most {max_retrieval_errors:.1%} may; "
            f"first cause: {cause}"
        )


def check_development(errors: Sequence[str]) -> None:
    """Raises EngineError when development workflows were broken off by the engine."""
    causes = [error for error in errors if error]
    if causes:
        raise EngineError(
            f"{len(causes)} of {len(errors)} development workflows were broken off, expected none; "
            f"first cause: {causes[0]}. The last checkpoint is intact: start the stage again"
        )


def _check_mismatch(rows: Sequence[ScoredRow], limit: float) -> float:
    mismatch = _mean(
        abs(old - rollout)
        for row in rows
        for old, rollout in zip(row.old, row.rollout, strict=True)
    )
    # `not <=` also catches NaN.
    if not mismatch <= limit:
        raise EngineMismatchError(
            f"mean |old - rollout| log-probability is {mismatch:.3f}, limit {limit}; check the "
            "weight sync and the dtype of the rollout engine"
        )
    return mismatch


def _reward_metrics(credits: Sequence[WorkflowCredit]) -> dict[str, float]:
    named: dict[str, list[float]] = {
        "leader_reward": [c.leader for c in credits if c.leader is not None],
        "searcher_reward": [c.searcher for c in credits if c.searcher is not None],
        "critic_reward": [r for c in credits for r in c.subtasks if r is not None],
        "answerer_reward": [r for c in credits for r in c.answers],
    }
    return {f"credit/{name}": fmean(values) for name, values in named.items() if values}


def _log_ratio_metric(rows: Sequence[ScoredRow], run: VerlRun) -> dict[str, float]:
    if run.row.opd_teacher is None:
        return {}
    ratios = [
        teacher - old
        for row in rows
        if row.meta["role"] == Role.SEARCHER
        for teacher, old in zip(
            (row.second if run.second_teacher is not None else row.reference) or row.old,
            row.old,
            strict=True,
        )
    ]
    return {"credit/teacher_log_ratio": fmean(ratios)} if ratios else {}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return fmean(listed) if listed else 0.0
