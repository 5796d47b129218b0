"""Golden reward table (sections 3.1-3.3), worked out by hand.

R_L = 0.9 R_EM + 0.1 min(C_tool, 6) / 6; R_S = 0.9 R_EM + 0.1 b; malformed: -1 for its owner alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moopd.rl.rewards import (
    WorkflowCredit,
    behaviour_bonus,
    leader_reward,
    searcher_reward,
    team_outcome,
    workflow_credit,
)
from moopd.systems import (
    CriticSignal,
    NoSignal,
    OpdSignal,
    OutcomeBonusSignal,
    OutcomeSignal,
    SearcherSignal,
)
from moopd.types import Judgement, Trajectory
from tests.support import REPORT, SEARCH, answer, play

BONUS = OutcomeBonusSignal(kind="outcome_bonus")
OUTCOME = OutcomeSignal(kind="outcome")
CRITIC = CriticSignal(kind="critic")
OPD = OpdSignal(kind="opd", teacher="t")
TASK = "<task> a </task>"
SELECT = "<select> 1 </select>"


@pytest.mark.parametrize(
    ("outcome", "num_tool_steps", "expected"),
    [
        (0.0, 0, 0.0),
        (0.0, 1, 0.1 / 6),  # 0.1 * 1/6
        (0.0, 6, 0.1),  # 0.1 * 6/6
        (0.0, 7, 0.1),  # capped at 6
        (1.0, 0, 0.9),
        (1.0, 1, 0.9 + 0.1 / 6),
        (1.0, 6, 1.0),
        (1.0, 7, 1.0),
    ],
)
def test_leader_reward(outcome: float, num_tool_steps: int, expected: float) -> None:
    assert leader_reward(outcome, num_tool_steps) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("num_searches", "reported", "bonus", "wrong", "right"),
    [
        (0, True, 0.0, 0.0, 0.9),
        (1, True, 0.5, 0.05, 0.95),  # 0.1 * 0.5; 0.9 + 0.05
        (2, True, 1.0, 0.1, 1.0),
        (5, True, 1.0, 0.1, 1.0),
        (2, False, 0.0, 0.0, 0.9),
        (1, False, 0.0, 0.0, 0.9),
    ],
)
def test_searcher_reward(
    num_searches: int, reported: bool, bonus: float, wrong: float, right: float
) -> None:
    assert behaviour_bonus(num_searches, reported) == bonus
    assert searcher_reward(0.0, bonus) == pytest.approx(wrong, abs=1e-12)
    assert searcher_reward(1.0, bonus) == pytest.approx(right, abs=1e-12)


def credit(
    texts: Sequence[str | Sequence[str]],
    signal: SearcherSignal,
    workflow: str = "hierarchy",
    judgements: dict[int, Judgement | None] | None = None,
) -> tuple[WorkflowCredit, Trajectory]:
    trajectory = play(workflow, texts, num_candidates=5)
    return workflow_credit(trajectory, signal, judgements), trajectory


CANDIDATES = [answer("x"), answer("y"), "nonsense", answer("X"), answer("y")]


def test_outcome_is_the_best_candidate_and_each_candidate_has_its_own_score() -> None:
    got, trajectory = credit([TASK, SEARCH, REPORT, SELECT, CANDIDATES], OPD)
    assert team_outcome(trajectory) == 1.0
    # x right, y wrong, malformed -1, X right after normalisation, y wrong.
    assert got.answers == (1.0, 0.0, -1.0, 1.0, 0.0)
    # One environment step searched: 0.9 + 0.1 * 1/6.
    assert got.leader == pytest.approx(0.9 + 0.1 / 6, abs=1e-12)
    assert (got.searcher, got.subtasks) == (None, ())


def test_outcome_is_the_best_candidate_wherever_it_stands() -> None:
    got, trajectory = credit([TASK, REPORT, SELECT, ["hm", answer("y"), *CANDIDATES[:3]]], OUTCOME)
    assert got.answers == (-1.0, 0.0, 1.0, 0.0, -1.0)
    assert (team_outcome(trajectory), got.searcher) == (1.0, 1.0)


def test_parallel_searches_are_one_step_in_the_leaders_reward() -> None:
    got, trajectory = credit(
        ["<task>a</task><task>b</task>", SEARCH, SEARCH, REPORT, REPORT, SELECT, CANDIDATES], OPD
    )
    assert (trajectory.num_searches, trajectory.num_tool_steps) == (2, 1)
    assert got.leader == pytest.approx(0.9 + 0.1 / 6, abs=1e-12)


def test_cascade_searcher_gets_outcome_and_bonus_and_there_is_no_leader() -> None:
    got, _ = credit([SEARCH, SEARCH, REPORT, CANDIDATES], BONUS, "cascade")
    assert (got.leader, got.searcher) == (None, pytest.approx(1.0, abs=1e-12))


def test_malformed_searcher_turn_costs_the_searcher_alone() -> None:
    texts = ["nonsense", SEARCH, REPORT, CANDIDATES]
    got, _ = credit(texts, BONUS, "cascade")
    assert (got.searcher, got.answers[0]) == (-1.0, 1.0)
    # An OPD Searcher gets no -1, and the Leader keeps its reward.
    got, _ = credit([TASK, *texts[:3], SELECT, CANDIDATES], OPD)
    assert got.searcher is None
    assert got.leader == pytest.approx(0.9 + 0.1 / 6, abs=1e-12)


def test_malformed_leader_turn_costs_the_leader_alone() -> None:
    got, _ = credit(["nonsense", CANDIDATES], OUTCOME)
    assert (got.leader, got.searcher, got.answers[0]) == (-1.0, 1.0, 1.0)


def test_a_sixth_dispatch_costs_the_leader() -> None:
    got, _ = credit([*[TASK, REPORT] * 5, TASK, CANDIDATES], OPD)
    assert got.leader == -1.0


def test_spent_step_budget_gives_the_search_share_and_no_penalty() -> None:
    got, trajectory = credit([TASK, *[SEARCH] * 12], OPD)
    assert trajectory.num_tool_steps == 12
    assert (got.leader, got.answers) == (pytest.approx(0.1, abs=1e-12), ())


def test_outcome_searcher_gets_the_final_answer_reward() -> None:
    assert credit([TASK, SEARCH, REPORT, SELECT, CANDIDATES], OUTCOME)[0].searcher == 1.0
    assert credit([TASK, "hm", REPORT, SELECT, CANDIDATES], OUTCOME)[0].searcher == -1.0


def test_critic_rewards_subtasks() -> None:
    texts = [
        "<task>a</task><task>b</task><task>c</task><task>d</task>",
        *[REPORT, REPORT, "hm", SEARCH],
        *[REPORT, *[SEARCH] * 1],
        *[SEARCH] * 10,
    ]
    verdicts = {0: Judgement(1, "good"), 1: None, 2: Judgement(1, "")}
    got, _ = credit(texts, CRITIC, judgements=verdicts)
    # a: judged 1; b: judge gave nothing usable; c: a malformed turn; d: no report.
    assert got.subtasks == (1.0, None, -1.0, 0.0)
    # An inadequate report is worth what a missing one is, not the price of a malformed turn.
    got, _ = credit(texts, CRITIC, judgements={**verdicts, 0: Judgement(0, "vague")})
    assert got.subtasks == (0.0, None, -1.0, 0.0)


def test_no_signal_leaves_the_searcher_unrewarded() -> None:
    got, _ = credit([TASK, SEARCH, REPORT, SELECT, CANDIDATES], NoSignal(kind="none"))
    assert (got.searcher, got.subtasks) == (None, ())
