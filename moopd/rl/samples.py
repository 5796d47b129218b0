"""Trajectories -> training samples: asks the teachers once, then `advantages` decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from moopd.engines.base import Engine
from moopd.rl.advantages import CreditConfig, CreditRow, assign_advantages
from moopd.rl.rewards import WorkflowCredit, workflow_credit
from moopd.systems import CriticSignal, TrainRow
from moopd.types import (
    Completion,
    Judgement,
    Owner,
    Role,
    ScoreRequest,
    TrainingSample,
    Trajectory,
)

Logprobs = tuple[float, ...]
Score = Callable[[Sequence[ScoreRequest]], list[Logprobs]]


@dataclass(frozen=True, slots=True)
class _Token:
    """One completion on its way to a sample."""

    owner: Owner
    subtask: int | None
    prompt_ids: tuple[int, ...]
    completion: Completion


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    samples: tuple[TrainingSample, ...]
    credits: tuple[WorkflowCredit, ...]
    metrics: dict[str, float]


def build_samples(
    trajectories: Sequence[Trajectory],
    train: TrainRow,
    config: CreditConfig,
    teachers: Mapping[str, Engine],
    judgements: Sequence[Mapping[int, Judgement | None]] | None = None,
    rescore: Score | None = None,
    importance_cap: float = 2.0,
) -> CreditedBatch:
    """Every trained completion of the batch with its advantages.

    `rescore`: recomputes old log-probabilities where the engine's numerics differ from the
    trainer's; then samples carry truncated importance weights.
    """
    verdicts = judgements or [{}] * len(trajectories)
    credits = tuple(
        workflow_credit(trajectory, train.searcher, verdict)
        for trajectory, verdict in zip(trajectories, verdicts, strict=True)
    )
    completions = [token for trajectory in trajectories for token in _completions(trajectory)]
    old = _old_logprobs(completions, rescore)
    rows = _credit_rows(completions, old, train, teachers)
    advantages = assign_advantages(rows, credits, train, config)
    samples = tuple(
        TrainingSample(
            owner=token.owner,
            prompt_ids=token.prompt_ids,
            token_ids=token.completion.token_ids,
            old_logprobs=old_,
            advantages=advantage,
            rollout_weights=None
            if rescore is None
            else _importance(old_, token.completion.logprobs, importance_cap),
        )
        for token, old_, advantage in zip(completions, old, advantages, strict=True)
        if advantage is not None and token.completion.token_ids
    )
    return CreditedBatch(samples, credits, _metrics(completions, old, rows, credits, advantages))


def _completions(trajectory: Trajectory) -> list[_Token]:
    return [
        _Token(
            owner=Owner(
                trajectory.question.id, trajectory.group_index, call.index, number, call.role
            ),
            subtask=call.subtask,
            prompt_ids=call.prompt_ids,
            completion=completion,
        )
        for call in trajectory.calls
        for number, completion in enumerate(call.completions)
    ]


def _old_logprobs(completions: Sequence[_Token], rescore: Score | None) -> list[Logprobs]:
    if rescore is None:
        return [token.completion.logprobs for token in completions]
    return rescore([ScoreRequest(t.prompt_ids, t.completion.token_ids) for t in completions])


def _credit_rows(
    completions: Sequence[_Token],
    old: Sequence[Logprobs],
    train: TrainRow,
    teachers: Mapping[str, Engine],
) -> list[CreditRow]:
    opd = _teacher_logprobs(completions, train.opd_teacher, teachers, searcher=True)
    kl = _teacher_logprobs(completions, train.kl_teacher, teachers, searcher=False)
    return [
        CreditRow(token.owner, token.subtask, old_, opd.get(token.owner), kl.get(token.owner))
        for token, old_ in zip(completions, old, strict=True)
    ]


def _teacher_logprobs(
    completions: Sequence[_Token],
    teacher: str | None,
    teachers: Mapping[str, Engine],
    *,
    searcher: bool,
) -> dict[Owner, Logprobs]:
    """What the teacher thinks of the sampled ids in the student's own histories."""
    if teacher is None:
        return {}
    wanted = [t for t in completions if (t.owner.role is Role.SEARCHER) == searcher]
    requests = [ScoreRequest(t.prompt_ids, t.completion.token_ids) for t in wanted]
    scores = teachers[teacher].score(requests)
    return {token.owner: score for token, score in zip(wanted, scores, strict=True)}


def _importance(old: Logprobs, rollout: Logprobs, cap: float) -> Logprobs:
    return tuple(min(math.exp(min(o - r, 20.0)), cap) for o, r in zip(old, rollout, strict=True))


def _metrics(
    completions: Sequence[_Token],
    old: Sequence[Logprobs],
    rows: Sequence[CreditRow],
    credits: Sequence[WorkflowCredit],
    advantages: Sequence[Logprobs | None],
) -> dict[str, float]:
    differences = [
        abs(o - r)
        for token, old_ in zip(completions, old, strict=True)
        for o, r in zip(old_, token.completion.logprobs, strict=True)
    ]
    log_ratios = [
        t - o
        for row in rows
        if row.opd_logprobs is not None
        for t, o in zip(row.opd_logprobs, row.old_logprobs, strict=True)
    ]
    metrics = {
        "rollout_mismatch": _mean(differences),
        "answerer_reward": _mean([r for credit in credits for r in credit.answers]),
        "trained_share": _mean([float(a is not None) for a in advantages]),
    }
    leader = [credit.leader for credit in credits if credit.leader is not None]
    searcher = [credit.searcher for credit in credits if credit.searcher is not None]
    critic = [r for credit in credits for r in credit.subtasks if r is not None]
    optional = {
        "leader_reward": leader,
        "searcher_reward": searcher,
        "critic_reward": critic,
        "teacher_log_ratio": log_ratios,
    }
    return metrics | {name: _mean(values) for name, values in optional.items() if values}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def needs_judge(train: TrainRow) -> bool:
    return isinstance(train.searcher, CriticSignal)
