"""Trajectory -> rewards per owner (sections 3.1-3.3; readings 1-3, 5-8, 10, 11 of the protocol).

One reward per (workflow, role) for Leader and outcome-rewarded Searcher, one per subtask under the
critic, one per candidate for the Answerer. A malformed turn replaces its owner's reward by -1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moopd.data.normalize import exact_match
from moopd.systems import (
    CriticSignal,
    NoSignal,
    OpdSignal,
    OutcomeBonusSignal,
    OutcomeSignal,
    SearcherSignal,
)
from moopd.types import FormatError, Judgement, Role, Trajectory

FORMAT_PENALTY = -1.0
OUTCOME_WEIGHT = 0.9
BEHAVIOUR_WEIGHT = 0.1
MAX_TOOL_STEPS = 6


@dataclass(frozen=True, slots=True)
class WorkflowCredit:
    """The rewards of one workflow, before any group is looked at.

    None where a role has no outcome reward (Leader of a cascade, Searcher under OPD).
    """

    question_id: str
    group_index: int
    leader: float | None
    searcher: float | None
    subtasks: tuple[float | None, ...]
    """Critic's reward per subtask; None where the judge gave no usable verdict; else empty."""
    answers: tuple[float, ...]
    """R_A,ij per candidate; empty when no answering request was made."""


def candidate_scores(trajectory: Trajectory) -> tuple[float, ...]:
    """c_ij: normalised exact match of each candidate; a malformed one counts 0."""
    golds = trajectory.question.answers
    return tuple(float(exact_match(answer, golds)) for answer in trajectory.answers)


def team_outcome(trajectory: Trajectory) -> float:
    """R_EM,i = max_j c_ij; 0 without an answering request (section 3.1)."""
    return max(candidate_scores(trajectory), default=0.0)


def leader_reward(outcome: float, num_tool_steps: int) -> float:
    """R_L,i = 0.9 R_EM,i + 0.1 min(C_tool,i, 6) / 6 (section 3.3)."""
    return OUTCOME_WEIGHT * outcome + BEHAVIOUR_WEIGHT * (
        min(num_tool_steps, MAX_TOOL_STEPS) / MAX_TOOL_STEPS
    )


def behaviour_bonus(num_searches: int, reported: bool) -> float:
    """b: 0.5 for one search then a report, 1 for two or more, else 0 (section 3.2)."""
    if not reported or num_searches == 0:
        return 0.0
    return 0.5 if num_searches == 1 else 1.0


def searcher_reward(outcome: float, bonus: float) -> float:
    """R_S,i = 0.9 R_EM,i + 0.1 b (section 3.2)."""
    return OUTCOME_WEIGHT * outcome + BEHAVIOUR_WEIGHT * bonus


def workflow_credit(
    trajectory: Trajectory,
    signal: SearcherSignal,
    judgements: Mapping[int, Judgement | None] | None = None,
) -> WorkflowCredit:
    """All rewards of one workflow. `judgements`: subtask id -> verdict on its report (critic)."""
    outcome = team_outcome(trajectory)
    leader = None
    if trajectory.workflow == "hierarchy":
        leader = leader_reward(outcome, trajectory.num_tool_steps)
        leader = FORMAT_PENALTY if _malformed(trajectory, Role.LEADER) else leader
    return WorkflowCredit(
        question_id=trajectory.question.id,
        group_index=trajectory.group_index,
        leader=leader,
        searcher=_searcher_outcome(trajectory, signal, outcome),
        subtasks=_critic_rewards(trajectory, judgements or {})
        if isinstance(signal, CriticSignal)
        else (),
        answers=_answer_rewards(trajectory),
    )


def _searcher_outcome(
    trajectory: Trajectory, signal: SearcherSignal, outcome: float
) -> float | None:
    match signal:
        case OutcomeBonusSignal():
            bonus = behaviour_bonus(trajectory.num_searches, bool(trajectory.reports))
            reward = searcher_reward(outcome, bonus)
        case OutcomeSignal():
            reward = outcome
        case CriticSignal() | OpdSignal() | NoSignal():
            return None
    return FORMAT_PENALTY if _malformed(trajectory, Role.SEARCHER) else reward


def _critic_rewards(
    trajectory: Trajectory, judgements: Mapping[int, Judgement | None]
) -> tuple[float | None, ...]:
    reported = {report.subtask for report in trajectory.reports}
    rewards: list[float | None] = []
    for subtask in trajectory.subtasks:
        if _malformed(trajectory, Role.SEARCHER, subtask.id):
            rewards.append(FORMAT_PENALTY)
        elif subtask.id not in reported:
            rewards.append(0.0)
        else:
            verdict = judgements[subtask.id]
            rewards.append(None if verdict is None else float(verdict.score))
    return tuple(rewards)


def _answer_rewards(trajectory: Trajectory) -> tuple[float, ...]:
    return tuple(
        FORMAT_PENALTY if answer is None else score
        for answer, score in zip(trajectory.answers, candidate_scores(trajectory), strict=True)
    )


def _malformed(trajectory: Trajectory, role: Role, subtask: int | None = None) -> bool:
    return any(
        isinstance(action, FormatError)
        for call in trajectory.calls
        if call.role is role and (subtask is None or call.subtask == subtask)
        for action in call.actions
    )
