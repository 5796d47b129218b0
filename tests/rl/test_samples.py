"""Golden token layout of one hierarchy transcript: who is trained, on what, with which credit."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moopd.rl.advantages import CreditConfig
from moopd.rl.samples import build_samples
from moopd.systems import TrainRow
from moopd.types import Completion, Role, Trajectory
from tests.support import REPORT, SEARCH, Script, answer, play, word_tokenizer

CONFIG = CreditConfig(5, 0.01, 0.001, "after", "per_workflow")
OPD = TrainRow.model_validate({"searcher": {"kind": "opd", "teacher": "t"}, "kl_teacher": "t"})
NONE = TrainRow.model_validate({"searcher": {"kind": "none"}, "kl_teacher": "t"})
TEXTS = ["<task> a </task>", SEARCH, REPORT, "<select> 1 </select>"]


def five_teams() -> list[Trajectory]:
    """Team 0 answers right once of five, the others never."""
    return [
        play("hierarchy", [*TEXTS, [answer("x" if team == c == 0 else "y") for c in range(5)]], 5,
             group_index=team)
        for team in range(5)
    ]  # fmt: skip


def test_layout_of_one_transcript() -> None:
    tokenizer = word_tokenizer()
    teacher = Script(tokenizer, lambda *_: "")
    batch = build_samples(five_teams(), OPD, CONFIG, {"t": teacher})
    mine = [sample for sample in batch.samples if sample.owner.group_index == 0]
    layout = [
        (
            sample.owner.role.value,
            tokenizer.decode(sample.prompt_ids),
            tokenizer.decode(sample.token_ids),
        )
        for sample in mine[:5]
    ]
    open_ = "[user] searcher question who a subtask a [assistant]"
    # The observation (passage red harbor; report 1 x) is prompt, never a trained token.
    assert layout == [
        ("leader", "[user] leader question who a [assistant]", "<task> a </task> [eos]"),
        ("searcher", open_, "<search> a </search> [eos]"),
        (
            "searcher",
            f"{open_} <search> a </search> [eos] [user] passage red harbor [assistant]",
            "<report> x </report> [eos]",
        ),
        (
            "leader",
            "[user] leader question who a [assistant] <task> a </task> [eos] "
            "[user] report 1 x [assistant]",
            "<select> 1 </select> [eos]",
        ),
        (
            "answerer",
            "[user] answerer question who a report 1 x [assistant]",
            "<answer> x </answer> [eos]",
        ),
    ]
    assert len(mine) == 4 + 5
    assert batch.metrics["teacher_log_ratio"] == pytest.approx(0.25, abs=1e-12)
    # Old -0.5, teacher -0.25: OPD 0.01 * 0.25 on the Searcher's four tokens, end token included.
    assert mine[1].advantages == pytest.approx((0.0025,) * 4, abs=1e-12)
    # Answerer inside team 0: one right of five, std sqrt(.2); KL after: - 0.001 * (-0.5 + 0.25)
    std = 0.2**0.5 + 1e-6
    assert mine[4].advantages == pytest.approx((0.8 / std + 0.00025,) * 4, abs=1e-9)
    # Leader: rewards .9 + .1/6 against four times .1/6: 4/5 of .9 over std .9 * sqrt(.2)
    assert mine[0].advantages[0] == pytest.approx(
        0.72 / (0.9 * 0.2**0.5 + 1e-6) + 0.00025, abs=1e-9
    )


def test_without_a_searcher_loss_no_searcher_token_is_left() -> None:
    batch = build_samples(five_teams(), NONE, CONFIG, {"t": Script(word_tokenizer(), str)})
    assert {sample.owner.role for sample in batch.samples} == {Role.LEADER, Role.ANSWERER}


def test_the_teacher_scores_exact_sampled_ids_in_the_students_histories() -> None:
    asked = []

    class Spy(Script):
        def score(self, requests):  # type: ignore[no-untyped-def]
            asked.extend(requests)
            return super().score(requests)

    trajectories = five_teams()
    build_samples(trajectories, OPD, CONFIG, {"t": Spy(word_tokenizer(), str)})
    sampled = {
        (call.prompt_ids, completion.token_ids)
        for t in trajectories
        for call in t.calls
        for completion in call.completions
    }
    assert {(request.prompt_ids, request.token_ids) for request in asked} == sampled
    # Once each: a team has 4 calls of one completion and one of five.
    assert len(asked) == 5 * (4 + 5)


def test_importance_weights_are_truncated_and_the_mismatch_is_measured() -> None:
    # Recomputed old -0.25, sampled -0.5: weight exp(0.25) = 1.284, cap 1.1; mismatch 0.25
    batch = build_samples(
        five_teams(), OPD, CONFIG, {"t": Script(word_tokenizer(), str)},
        rescore=Script(word_tokenizer(), str).score, importance_cap=1.1,
    )  # fmt: skip
    assert batch.samples[0].rollout_weights == pytest.approx((1.1,) * 4)
    assert batch.metrics["rollout_mismatch"] == pytest.approx(0.25, abs=1e-12)
    assert batch.metrics["teacher_log_ratio"] == pytest.approx(0.0, abs=1e-12)


def test_a_token_less_likely_than_when_sampled_weighs_less() -> None:
    # Recomputed old -0.75, sampled -0.5: weight exp(-0.25), mismatch |-0.25|.
    batch = build_samples(
        five_teams(), OPD, CONFIG, {"t": Script(word_tokenizer(), str)},
        rescore=lambda requests: [(-0.75,) * len(request.token_ids) for request in requests],
    )  # fmt: skip
    assert batch.samples[0].rollout_weights == pytest.approx((math.exp(-0.25),) * 4, abs=1e-12)
    assert batch.metrics["rollout_mismatch"] == pytest.approx(0.25, abs=1e-12)


def leader_said(trajectory: Trajectory, completion: Completion) -> Trajectory:
    first, *rest = trajectory.calls
    return replace(trajectory, calls=(replace(first, completions=(completion,)), *rest))


def test_a_completion_without_tokens_is_no_sample() -> None:
    teams = five_teams()
    teams[0] = leader_said(teams[0], Completion((), (), "", "length"))
    batch = build_samples(teams, OPD, CONFIG, {"t": Script(word_tokenizer(), str)})
    assert (0, 0) not in {(s.owner.group_index, s.owner.call) for s in batch.samples}


def test_a_weight_beyond_all_floats_is_truncated_too() -> None:
    # exp(-0.25 + 1000) overflows.
    teams = five_teams()
    teams[0] = leader_said(teams[0], Completion((1,), (-1000.0,), "", "stop"))
    script = Script(word_tokenizer(), str)
    batch = build_samples(teams, OPD, CONFIG, {"t": script}, rescore=script.score)
    assert batch.samples[0].rollout_weights == (2.0,)
