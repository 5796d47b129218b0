"""What a batch of trajectories did: score, search, completion, format (curves, alarms)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from moopd.rl.rewards import candidate_scores, team_outcome
from moopd.types import FormatError, Role, StopReason, Trajectory

_ROLES = (Role.LEADER, Role.SEARCHER, Role.ANSWERER)
_COLLAPSED = 0.5
_SEARCHING = 0.2


def behaviour(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means over workflows; shares between 0 and 1. Empty input is an error of the caller."""
    return {
        "em": fmean(_first(candidate_scores(t)) for t in trajectories),
        "em_any": fmean(team_outcome(t) for t in trajectories),
        "no_search": fmean(float(t.num_searches == 0) for t in trajectories),
        "with_subtasks": fmean(float(bool(t.subtasks)) for t in trajectories),
        "with_reports": fmean(float(bool(t.reports)) for t in trajectories),
        "with_answer": fmean(float(any(a is not None for a in t.answers)) for t in trajectories),
        "answered": fmean(float(t.stop is StopReason.ANSWERED) for t in trajectories),
        "searches": fmean(t.num_searches for t in trajectories),
        "repeated_queries": fmean(t.num_repeated_queries for t in trajectories),
        "rounds": fmean(t.num_rounds for t in trajectories),
        "steps": fmean(t.num_steps for t in trajectories),
        "input_tokens": fmean(t.input_tokens for t in trajectories),
        "output_tokens": fmean(t.output_tokens for t in trajectories),
        "retrieval_errors": fmean(
            sum(r.error is not None for r in t.retrievals) / max(1, len(t.retrievals))
            for t in trajectories
        ),
        **{f"malformed_{role}": _malformed(trajectories, role) for role in _ROLES},
    }


def search_collapsed(history: Sequence[Mapping[str, float]]) -> bool:
    """The alarm of section A.5: most workflows stopped searching although nearly all once did.

    Reads `dev/no_search` of the validations so far; completion says nothing of this failure.
    """
    shares = [entry["dev/no_search"] for entry in history if "dev/no_search" in entry]
    return bool(shares) and shares[-1] >= _COLLAPSED and min(shares) <= _SEARCHING


def _first(scores: Sequence[float]) -> float:
    return scores[0] if scores else 0.0


def _malformed(trajectories: Sequence[Trajectory], role: Role) -> float:
    actions = [a for t in trajectories for c in t.calls if c.role is role for a in c.actions]
    return sum(isinstance(a, FormatError) for a in actions) / len(actions) if actions else 0.0
