"""Rows and credit of the verl plug-in against the torch trainer's own path, without verl."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from moopd.engines.base import EngineError
from moopd.retrieval.base import RetrievalError
from moopd.rl.samples import build_samples
from moopd.systems import System
from moopd.trainers.loop import credit_config
from moopd.trainers.verl_plugin.credit import (
    EngineMismatchError,
    ScoredRow,
    check_development,
    credit_batch,
)
from moopd.trainers.verl_plugin.rows import (
    NO_CALL,
    broken_row,
    read_samples,
    rows_of,
    write_samples,
)
from moopd.trainers.verl_plugin.spec import VerlRun
from moopd.types import Retrieval, ScoreRequest, StopReason, Trajectory
from tests.support import QUESTION, REPORT, SEARCH, Script, answer, play, word_tokenizer
from tests.trainers.verl_plugin import scene

TASK = "<task> who a </task>"
SELECT = "<select> 1 </select>"


def run_of(name: str, **training: Any) -> VerlRun:
    scale = scene.smoke_scale(**training)
    return VerlRun(
        system=scene.system(name),
        seed=1,
        num_steps=2,
        work="/nowhere",
        training=scale.training,
        workflow=scale.workflow,
        evaluation_sampling=scale.evaluation.sampling,
        prompt_style="compact",
        retrieval_url="http://127.0.0.1:1",
        teachers={"cmas_rl": "/teacher", "base": "/base"},
    )


def hierarchy_batch() -> list[Trajectory]:
    """Two workflows of one question: one right after a search, one malformed at its start."""
    right = play("hierarchy", [TASK, SEARCH, REPORT, SELECT, [answer("x"), answer("y")]], 2)
    wrong = play("hierarchy", ["a b", [answer("y"), answer("z")]], 2, group_index=1)
    return [right, wrong]


def scored(
    trajectories: list[Trajectory], system: System, reference: float, second: float | None = None
) -> list[ScoredRow]:
    assert system.train is not None
    rows = [row for t in trajectories for row in rows_of(t, system.train.searcher, filler=1)]
    return [
        ScoredRow(
            meta=json.loads(json.dumps(row.meta)),
            old=tuple(-0.5 for _ in row.token_ids) if row.trained else (),
            rollout=row.logprobs if row.trained else (),
            reference=tuple(reference for _ in row.token_ids) if row.trained else (),
            second=None if second is None else tuple(second for _ in row.token_ids if row.trained),
        )
        for row in rows
    ]


class Teacher(Script):
    """Scores every token with one value."""

    def __init__(self, value: float) -> None:
        super().__init__(word_tokenizer(), lambda *_: "")
        self.value = value

    def score(self, requests: Any) -> list[tuple[float, ...]]:
        assert all(isinstance(request, ScoreRequest) for request in requests)
        return [(self.value,) * len(request.token_ids) for request in requests]


@pytest.mark.parametrize("placement", ["before", "after"])
@pytest.mark.parametrize("name", ["multiagent_opd", "opd_outcome_searcher", "opd_no_searcher_loss"])
def test_advantages_are_those_of_the_torch_trainer(name: str, placement: str) -> None:
    run = run_of(name, kl_placement=placement, kl_coef=0.3)
    batch = hierarchy_batch()
    ours = credit_batch(scored(batch, run.system, reference=-0.2), run)
    theirs = build_samples(batch, run.row, credit_config(run.training), {"cmas_rl": Teacher(-0.2)})
    assert [a for a in ours.advantages if a] == [s.advantages for s in theirs.samples]
    shared = {"leader_reward", "answerer_reward", "trained_share", "rollout_mismatch"}
    for metric in shared | ({"teacher_log_ratio"} & set(theirs.metrics)):
        assert ours.metrics[f"credit/{metric}"] == pytest.approx(theirs.metrics[metric])


def test_base_teacher_row_distils_from_the_second_teacher() -> None:
    run = run_of("opd_base_teacher", beta=0.1)
    assert (run.reference_teacher, run.second_teacher) == ("cmas_rl", "base")
    rows = scored(hierarchy_batch(), run.system, reference=-9.0, second=-0.3)
    found = credit_batch(rows, run)
    searcher = [a for a, row in zip(found.advantages, rows, strict=True)
                if row.meta["role"] == "searcher"]  # fmt: skip
    # beta * (second - old) = 0.1 * (-0.3 + 0.5) = 0.02, whatever the KL teacher says.
    assert searcher and all(a == pytest.approx((0.02,) * len(a or ())) for a in searcher)


def test_stage_one_needs_no_teacher() -> None:
    run = run_of("cmas_rl")
    assert run.reference_teacher is None and run.second_teacher is None
    batch = [
        play("cascade", [SEARCH, REPORT, [answer("x"), answer("y")]], 2),
        play("cascade", ["a"] * 5, 2, group_index=1),
    ]
    rows = [replace(row, reference=None) for row in scored(batch, run.system, 0.0)]
    found = credit_batch(rows, run)
    first, last = found.advantages[0], found.advantages[-1]
    # R_S = 0.9 * 1 + 0.1 * 0.5 = 0.95 and -1: mean -0.025, unbiased std 1.95 / sqrt(2).
    expected = 0.975 / (1.95 / 2**0.5 + 1e-6)
    assert first == pytest.approx((expected,) * len(first or ()))
    assert last == pytest.approx((-expected,) * len(last or ()))


def test_a_workflow_without_a_call_still_counts_in_its_group() -> None:
    run = run_of("multiagent_opd")
    right = hierarchy_batch()[0]
    empty = replace(right, calls=(), subtasks=(), retrievals=(), reports=(), selected=(),
                    group_index=1, stop=StopReason.CONTEXT, num_tool_steps=0)  # fmt: skip
    rows = scored([right, empty], run.system, reference=-0.5)
    assert rows[-1].meta["call"] == NO_CALL
    found = credit_batch(rows, run)
    assert found.advantages[-1] is None
    # R_L = 0.9 + 0.1 * 1/6 and 0: the Leader of the right workflow is above the mean.
    assert (found.advantages[0] or (0.0,))[0] > 0.7


def test_a_missing_workflow_is_an_error() -> None:
    run = run_of("multiagent_opd")
    with pytest.raises(ValueError, match="has 1 workflows, expected 2"):
        credit_batch(scored(hierarchy_batch()[:1], run.system, 0.0), run)


def test_a_broken_workflow_refuses_the_batch_with_its_cause() -> None:
    run = run_of("multiagent_opd")
    broken = broken_row("q1", 1, filler=1, error="TimeoutError: 5 s")
    rows = scored(hierarchy_batch()[:1], run.system, 0.0)
    rows.append(ScoredRow(meta=broken.meta, old=(), rollout=()))
    with pytest.raises(EngineError, match=r"1 of 2 workflows.*TimeoutError: 5 s"):
        credit_batch(rows, run)
    with pytest.raises(EngineError, match=r"1 of 2 development workflows.*gone"):
        check_development(["", "gone"])
    check_development(["", ""])


def test_failed_retrievals_refuse_the_batch() -> None:
    run = run_of("multiagent_opd")
    good, bad = hierarchy_batch()
    failed = (Retrieval(1, 0, "a", (), "server gone"),)
    with pytest.raises(RetrievalError, match=r"1 of 2 retrievals failed.*server gone"):
        credit_batch(scored([good, replace(bad, retrievals=failed)], run.system, 0.0), run)


@pytest.mark.parametrize("rollout", [-3.0, float("nan")])
def test_numerics_that_drift_apart_stop_the_run(rollout: float) -> None:
    run = run_of("multiagent_opd", max_mismatch=0.5)
    rows = [
        replace(row, rollout=(rollout,) * len(row.old))
        for row in scored(hierarchy_batch(), run.system, 0.0)
    ]
    with pytest.raises(EngineMismatchError, match=r"limit 0\.5"):
        credit_batch(rows, run)


def test_kept_rows_come_back_as_they_were(tmp_path: Any) -> None:
    run = run_of("cmas_rl")
    batch = [play("cascade", [SEARCH, REPORT, answer("x")])]
    samples = list(build_samples(batch, run.row, replace(credit_config(run.training),
                                                         group_size=1), {}).samples)  # fmt: skip
    write_samples(tmp_path, 3, samples)
    assert read_samples(tmp_path, 3) == samples


def test_question_of_the_batch_is_plain_data() -> None:
    """Rows travel through verl's queue: nothing but JSON values may be in them."""
    (row, *_) = rows_of(hierarchy_batch()[0], scene.system("multiagent_opd").train.searcher, 1)  # type: ignore[union-attr]
    assert json.loads(json.dumps(row.meta))["workflow"]["question"] == QUESTION.id
