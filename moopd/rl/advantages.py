"""The one place that decides credit: rewards and teacher log-probabilities -> advantage per token.

Leader: group = the question's workflows. Answerer: group = the candidates of one request. Searcher:
OPD, A_t = beta * (log pi_T - log pi_old), or a group as the signal says (section 3.3).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moopd.rl.rewards import WorkflowCredit
from moopd.systems import CriticSignal, NoSignal, OpdSignal, TrainRow
from moopd.types import Owner, Role

EPSILON = 1e-6

Group = tuple[str, ...] | tuple[str, str, int]
Unit = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CreditConfig:
    """The numbers that credit depends on (protocol, rewards and advantages)."""

    group_size: int
    beta: float
    kl_coef: float
    kl_placement: Literal["before", "after"]
    advantage_scope: Literal["per_workflow", "per_call"]


@dataclass(frozen=True, slots=True)
class CreditRow:
    """One completion. Log-probability tuples have one entry per generated token."""

    owner: Owner
    subtask: int | None
    old_logprobs: tuple[float, ...]
    opd_logprobs: tuple[float, ...] | None = None
    """Under the OPD teacher; needed for Searcher rows of an OPD system."""
    kl_logprobs: tuple[float, ...] | None = None
    """Under the KL teacher; needed for Leader and Answerer rows where the system names one."""


def normalise(rewards: Sequence[float]) -> list[float]:
    """(R - mean) / (std + 1e-6), unbiased std; a lone or all-equal group gives 0.

    Raises ValueError for a reward that is not finite.
    """
    if not all(math.isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards {list(rewards)} must be finite; check where they were computed")
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    variance = math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
    return [(reward - mean) / (math.sqrt(variance) + EPSILON) for reward in rewards]


def opd_advantages(
    teacher: Sequence[float], old: Sequence[float], beta: float
) -> tuple[float, ...]:
    """A_t = beta * (log pi_T(a_t|h_t) - log pi_old(a_t|h_t)) (section 3.3)."""
    return tuple(beta * (t - o) for t, o in zip(teacher, old, strict=True))


def assign_advantages(
    rows: Sequence[CreditRow],
    credits: Sequence[WorkflowCredit],
    train: TrainRow,
    config: CreditConfig,
) -> list[tuple[float, ...] | None]:
    """Advantage of every token of every row; None where the row is not trained.

    `credits` holds every workflow of the batch, also those without a trained token. Raises
    ValueError when a question has not exactly `group_size` workflows or a row has no workflow.
    """
    _check_groups(rows, credits, config.group_size)
    scalars = _group_advantages(rows, credits, train, config)
    return [_row_advantages(row, scalars, train, config) for row in rows]


def _row_advantages(
    row: CreditRow,
    scalars: Mapping[Group, Mapping[Unit, float]],
    train: TrainRow,
    config: CreditConfig,
) -> tuple[float, ...] | None:
    signal = train.searcher
    if row.owner.role is Role.SEARCHER and isinstance(signal, NoSignal):
        return None
    if row.owner.role is Role.SEARCHER and isinstance(signal, OpdSignal):
        return opd_advantages(_needed(row, row.opd_logprobs, "OPD"), row.old_logprobs, config.beta)
    group, unit = _place(row, train, config)
    # Without any usable verdict of the critic a question has no group at all.
    scalar = scalars.get(group, {}).get(unit)
    if scalar is None:
        return None
    if _has_kl(row, train) and config.kl_placement == "after":
        teacher = _needed(row, row.kl_logprobs, "KL")
        return tuple(
            scalar - config.kl_coef * (old - t)
            for old, t in zip(row.old_logprobs, teacher, strict=True)
        )
    return (scalar,) * len(row.old_logprobs)


def _group_advantages(
    rows: Sequence[CreditRow],
    credits: Sequence[WorkflowCredit],
    train: TrainRow,
    config: CreditConfig,
) -> dict[Group, dict[Unit, float]]:
    rewards: dict[Group, dict[Unit, float]] = defaultdict(dict)
    for credit in credits:
        for group, unit, reward in _units(credit):
            rewards[group][unit] = reward
    if config.advantage_scope == "per_call":
        rewards = _per_call(rows, rewards, train)
    if train.kl_teacher is not None and config.kl_placement == "before":
        for row in rows:
            if _has_kl(row, train):
                group, unit = _place(row, train, config)
                teacher = _needed(row, row.kl_logprobs, "KL")
                rewards[group][unit] -= config.kl_coef * math.fsum(
                    old - t for old, t in zip(row.old_logprobs, teacher, strict=True)
                )
    return {
        group: dict(zip(units, normalise(list(units.values())), strict=True))
        for group, units in rewards.items()
    }


def _units(credit: WorkflowCredit) -> Iterable[tuple[Group, Unit, float]]:
    """(group, what is counted once in it, reward) for everything one workflow is rewarded for."""
    question, workflow = credit.question_id, credit.group_index
    if credit.leader is not None:
        yield (Role.LEADER, question), (workflow,), credit.leader
    if credit.searcher is not None:
        yield (Role.SEARCHER, question), (workflow,), credit.searcher
    for subtask, reward in enumerate(credit.subtasks):
        if reward is not None:
            yield (Role.SEARCHER, question), (workflow, subtask), reward
    for candidate, reward in enumerate(credit.answers):
        yield (Role.ANSWERER, question, workflow), (candidate,), reward


def _place(row: CreditRow, train: TrainRow, config: CreditConfig) -> tuple[Group, Unit]:
    owner = row.owner
    if owner.role is Role.ANSWERER:
        return (Role.ANSWERER, owner.question_id, owner.group_index), (owner.candidate,)
    group = (owner.role.value, owner.question_id)
    if owner.role is Role.SEARCHER and isinstance(train.searcher, CriticSignal):
        if row.subtask is None:
            raise ValueError(f"row of {owner} has no subtask; the critic rewards subtasks")
        return group, (owner.group_index, row.subtask)
    if config.advantage_scope == "per_call":
        return group, (owner.group_index, owner.call)
    return group, (owner.group_index,)


def _per_call(
    rows: Sequence[CreditRow], rewards: Mapping[Group, Mapping[Unit, float]], train: TrainRow
) -> dict[Group, dict[Unit, float]]:
    """Workflow rewards repeated for each call, so that every call counts in mean and std."""
    critic = isinstance(train.searcher, CriticSignal)
    finer = (Role.ANSWERER, Role.SEARCHER) if critic else (Role.ANSWERER,)
    repeated = {group: dict(units) for group, units in rewards.items() if group[0] in finer}
    for row in rows:
        group = (row.owner.role.value, row.owner.question_id)
        if row.owner.role not in finer and group in rewards:
            key = (row.owner.group_index, row.owner.call)
            repeated.setdefault(group, {})[key] = rewards[group][(row.owner.group_index,)]
    return repeated


def _has_kl(row: CreditRow, train: TrainRow) -> bool:
    return train.kl_teacher is not None and row.owner.role is not Role.SEARCHER


def _needed(row: CreditRow, logprobs: tuple[float, ...] | None, what: str) -> tuple[float, ...]:
    if logprobs is None or len(logprobs) != len(row.old_logprobs):
        got = "none" if logprobs is None else str(len(logprobs))
        raise ValueError(
            f"{what} teacher log-probabilities of {row.owner}: got {got}, expected "
            f"{len(row.old_logprobs)}, one per sampled token"
        )
    return logprobs


def _check_groups(
    rows: Sequence[CreditRow], credits: Sequence[WorkflowCredit], group_size: int
) -> None:
    groups: dict[str, set[int]] = defaultdict(set)
    for credit in credits:
        if credit.group_index in groups[credit.question_id]:
            raise ValueError(
                f"question {credit.question_id} has workflow {credit.group_index} twice in a batch"
            )
        groups[credit.question_id].add(credit.group_index)
    for question, members in groups.items():
        if len(members) != group_size:
            raise ValueError(
                f"question {question} has {len(members)} workflows, expected {group_size}; "
                "every workflow must reach the trainer, failed ones too"
            )
    for row in rows:
        if row.owner.group_index not in groups.get(row.owner.question_id, ()):
            raise ValueError(f"row of {row.owner} belongs to no workflow of the batch")
