"""Golden: one question, 5 teams x 5 candidates, credit on every token; groups never mix."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moopd.rl.advantages import CreditConfig, CreditRow, assign_advantages, normalise
from moopd.rl.rewards import WorkflowCredit
from moopd.systems import TrainRow
from moopd.types import Owner, Role

CONFIG = CreditConfig(5, beta=0.01, kl_coef=0.001, kl_placement="after",
                      advantage_scope="per_workflow")  # fmt: skip
OPD = TrainRow.model_validate({"searcher": {"kind": "opd", "teacher": "t"}, "kl_teacher": "t"})
STAGE1 = TrainRow.model_validate({"searcher": {"kind": "outcome_bonus"}})
NONE = TrainRow.model_validate({"searcher": {"kind": "none"}, "kl_teacher": "t"})
CRITIC = TrainRow.model_validate({"searcher": {"kind": "critic"}})
OUTCOME = TrainRow.model_validate({"searcher": {"kind": "outcome"}, "kl_teacher": "t"})

# c_ij of the golden: team 0 all right, team 1 all wrong, team 2 one right of five, team 3 has one
# malformed among wrong ones, team 4 never asked the Answerer.
ANSWERS = (
    (1.0, 1.0, 1.0, 1.0, 1.0),
    (0.0, 0.0, 0.0, 0.0, 0.0),
    (1.0, 0.0, 0.0, 0.0, 0.0),
    (0.0, 0.0, -1.0, 0.0, 0.0),
    (),
)
LEADER = (1.0, 0.1, 1.0, 0.1, -1.0)


def credits(question: str = "q") -> list[WorkflowCredit]:
    return [
        WorkflowCredit(question, team, LEADER[team], None, (), ANSWERS[team]) for team in range(5)
    ]


def row(
    team: int,
    role: Role,
    call: int = 0,
    candidate: int = 0,
    old: float = -1.0,
    teacher: float = -1.0,
    question: str = "q",
    subtask: int | None = None,
) -> CreditRow:
    owner = Owner(question, team, call, candidate, role)
    return CreditRow(owner, subtask, (old, old), (teacher, teacher), (teacher, teacher))


def scalar(rows: list[CreditRow], train: TrainRow = OPD, config: CreditConfig = CONFIG,
           given: list[WorkflowCredit] | None = None) -> list[float]:  # fmt: skip
    got = assign_advantages(rows, given or credits(), train, config)
    return [advantage[0] if advantage is not None else math.nan for advantage in got]


def test_leaders_are_compared_over_the_five_teams() -> None:
    # mean (1 + .1 + 1 + .1 - 1) / 5 = 0.24; deviations .76 -.14 .76 -.14 -1.24
    # squares .5776 .0196 .5776 .0196 1.5376 sum 2.732; / 4 = .683; sqrt = 0.826438
    std = math.sqrt(0.683)
    expected = [d / (std + 1e-6) for d in (0.76, -0.14, 0.76, -0.14, -1.24)]
    got = scalar([row(team, Role.LEADER) for team in range(5)])
    assert got == pytest.approx(expected, abs=1e-9)


def test_candidates_are_compared_inside_their_own_team_only() -> None:
    rows = [row(t, Role.ANSWERER, 3, c) for t in range(4) for c in range(5)]
    got = scalar(rows)
    assert got[0:10] == [0.0] * 10  # all right, all wrong: nothing to compare
    # team 2: mean .2, squares .64 + 4 * .04 = .8, / 4 = .2, std .447214
    std = math.sqrt(0.2)
    assert got[10:15] == pytest.approx([0.8 / (std + 1e-6)] + [-0.2 / (std + 1e-6)] * 4, abs=1e-9)
    # team 3: mean -.2, the malformed one -.8, the others .2; same spread
    assert got[15:20] == pytest.approx(
        [0.2 / (std + 1e-6)] * 2 + [-0.8 / (std + 1e-6)] + [0.2 / (std + 1e-6)] * 2, abs=1e-9
    )


def test_opd_follows_the_teacher_with_the_right_sign() -> None:
    # 0.01 * (-0.5 - -1.5) = 0.01: the teacher likes the token more than the sampler did.
    liked, disliked, same = scalar([
        row(0, Role.SEARCHER, old=-1.5, teacher=-0.5),
        row(0, Role.SEARCHER, old=-0.5, teacher=-1.5),
        row(0, Role.SEARCHER, old=-0.7, teacher=-0.7),
    ])  # fmt: skip
    assert (liked, disliked, same) == (pytest.approx(0.01, abs=1e-12),
                                       pytest.approx(-0.01, abs=1e-12), 0.0)  # fmt: skip


def test_opd_is_per_token_and_has_neither_group_nor_extra_kl() -> None:
    token_row = CreditRow(Owner("q", 1, 1, 0, Role.SEARCHER), 0, (-1.0, -2.0, -3.0),
                          (-2.0, -2.0, -1.0), None)  # fmt: skip
    (got,) = assign_advantages([token_row], credits(), OPD, CONFIG)
    assert got == pytest.approx((-0.01, 0.0, 0.02), abs=1e-12)


def test_kl_after_normalisation_is_per_token() -> None:
    # Leader of team 0: scalar - 0.001 * (old - teacher) = scalar - 0.001 * (-1 + 3)
    plain = scalar([row(0, Role.LEADER)])[0]
    assert scalar([row(0, Role.LEADER, teacher=-3.0)])[0] == pytest.approx(plain - 0.002, abs=1e-12)


def test_kl_before_normalisation_sums_over_the_owners_tokens() -> None:
    config = replace(CONFIG, kl_placement="before", kl_coef=0.1)
    rows = [row(t, Role.LEADER, call=k, teacher=-1.0 - t) for t in range(5) for k in range(2)]
    # 2 calls x 2 tokens: R_L,i - 0.1 * 4 * i = 1, -.3, .2, -1.1, -2.6
    expected = normalise([1.0, -0.3, 0.2, -1.1, -2.6])
    assert scalar(rows, config=config)[::2] == pytest.approx(expected, abs=1e-9)
    assert scalar(rows, config=config)[1::2] == pytest.approx(expected, abs=1e-9)


def test_kl_before_normalisation_falls_on_each_candidate_apart() -> None:
    config = replace(CONFIG, kl_placement="before", kl_coef=0.1)
    rows = [row(1, Role.ANSWERER, 3, c, teacher=-1.0 - c) for c in range(5)]
    # Team 1 scores 0 throughout; 2 tokens, log pi_old - log pi_T = c each: R - 0.1 * 2 * c.
    expected = normalise([0.0, -0.2, -0.4, -0.6, -0.8])
    assert scalar(rows, config=config) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("placement", ["before", "after"])
def test_an_outcome_rewarded_searcher_carries_no_kl(placement: str) -> None:
    config = replace(CONFIG, kl_placement=placement, kl_coef=0.1)  # type: ignore[arg-type]
    rewards = (1.0, 0.0, 1.0, 0.0, -1.0)
    given = [WorkflowCredit("q", t, 0.0, rewards[t], (), ()) for t in range(5)]
    rows = [row(t, Role.SEARCHER, teacher=-1.0 - t) for t in range(5)]
    got = scalar(rows, OUTCOME, config, given)
    assert got == pytest.approx(normalise(rewards), abs=1e-12)


def test_equal_outcomes_leave_only_the_searcher_with_a_signal() -> None:
    equal = [WorkflowCredit("q", t, 0.5, None, (), (0.0,) * 5) for t in range(5)]
    rows = [row(0, Role.LEADER), row(0, Role.ANSWERER, 2), row(0, Role.SEARCHER, 1, teacher=-0.2)]
    config = replace(CONFIG, kl_coef=0.0)
    assert scalar(rows, config=config, given=equal) == pytest.approx([0, 0, 0.008], abs=1e-12)


def test_no_signal_removes_searcher_tokens_altogether() -> None:
    got = assign_advantages([row(0, Role.SEARCHER), row(0, Role.LEADER)], credits(), NONE, CONFIG)
    assert got[0] is None and got[1] is not None


def test_stage_one_searchers_are_compared_over_the_teams() -> None:
    rewards = (1.0, 0.95, 0.1, 0.0, -1.0)
    given = [WorkflowCredit("q", t, None, rewards[t], (), ()) for t in range(5)]
    got = scalar([row(t, Role.SEARCHER) for t in range(5)], STAGE1, given=given)
    assert got == pytest.approx(normalise(rewards), abs=1e-12)


def test_critic_compares_all_subtasks_of_the_question() -> None:
    subtasks: tuple[tuple[float | None, ...], ...] = ((1.0, 0.0), (1.0,), (), (-1.0,), (None,))
    given = [WorkflowCredit("q", t, 0.0, None, subtasks[t], ()) for t in range(5)]
    places = [(0, 0), (0, 1), (1, 0), (3, 0), (4, 0)]
    got = scalar([row(t, Role.SEARCHER, subtask=s) for t, s in places], CRITIC, given=given)
    assert got[:4] == pytest.approx(normalise([1.0, 0.0, 1.0, -1.0]), abs=1e-12)
    assert math.isnan(got[4])  # no usable verdict: not trained
    # A subtask is finer than a call already: the scope changes nothing.
    config = replace(CONFIG, advantage_scope="per_call")
    rows = [row(t, Role.SEARCHER, call=n, subtask=s) for n, (t, s) in enumerate(places)]
    assert scalar(rows, CRITIC, config, given)[:4] == got[:4]


def test_a_question_without_any_usable_verdict_trains_no_searcher() -> None:
    given = [WorkflowCredit("q", t, 0.1 * t, None, (None,), ()) for t in range(5)]
    rows = [row(0, Role.SEARCHER, subtask=0), row(0, Role.LEADER)]
    got = assign_advantages(rows, given, CRITIC, CONFIG)
    assert got[0] is None and got[1] is not None


def test_per_call_scope_counts_every_call() -> None:
    config = replace(CONFIG, advantage_scope="per_call")
    rows = [row(0, Role.LEADER, call=0), row(0, Role.LEADER, call=2)]
    rows += [row(t, Role.LEADER) for t in range(1, 5)]
    expected = normalise([1.0, 1.0, 0.1, 1.0, 0.1, -1.0])
    assert scalar(rows, config=config) == pytest.approx(expected, abs=1e-12)


def test_questions_do_not_mix() -> None:
    other = [replace(c, leader=5.0 * c.group_index) for c in credits("other")]
    rows = [row(t, Role.LEADER) for t in range(5)]
    assert scalar(rows) == scalar(rows, given=[*credits(), *other])


@pytest.mark.parametrize("rewards", [[0.3], [0.1] * 5, []])
def test_lone_and_all_equal_groups_give_zero(rewards: list[float]) -> None:
    assert normalise(rewards) == [0.0] * len(rewards)


def test_a_tiny_difference_is_damped_by_epsilon() -> None:
    # deviations +-5e-8, std 7.071e-8: 5e-8 / (7.071e-8 + 1e-6) = 0.046698
    assert normalise([1e-7, 0.0]) == pytest.approx([0.046698, -0.046698], abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_stops_the_step(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        normalise([0.0, value])


def test_a_group_of_the_wrong_size_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="4 workflows, expected 5"):
        assign_advantages([], credits()[:4], OPD, CONFIG)
    with pytest.raises(ValueError, match="6 workflows, expected 5"):
        assign_advantages([], [*credits(), replace(credits()[0], group_index=5)], OPD, CONFIG)
    with pytest.raises(ValueError, match="belongs to no workflow"):
        assign_advantages([row(5, Role.LEADER)], credits(), OPD, CONFIG)
    with pytest.raises(ValueError, match="twice"):
        assign_advantages([], [*credits(), credits()[0]], OPD, CONFIG)


def test_teacher_scores_of_another_length_are_refused() -> None:
    bad = replace(row(0, Role.SEARCHER), opd_logprobs=(-1.0,))
    with pytest.raises(ValueError, match="got 1, expected 2"):
        assign_advantages([bad], credits(), OPD, CONFIG)
