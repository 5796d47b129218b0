"""Rules: same seed, same losses; a resumed run equals an uninterrupted one exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moopd.config import EvaluationConfig, TrainingConfig, WorkflowConfig
from moopd.engines.local import LocalEngine
from moopd.retrieval.base import RetrievalError
from moopd.rl.critic import JudgeError, ReportToJudge
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.systems import System, TrainRow
from moopd.trainers import loop
from moopd.trainers.checkpoints import CheckpointError, reference, verify
from moopd.trainers.loop import (
    MismatchError,
    TrainingParts,
    TrainingResult,
    TrainingTask,
    questions_of_step,
    train,
)
from moopd.trainers.torch_trainer import TorchTrainer
from moopd.types import (
    CheckpointRef,
    Completion,
    GenerateRequest,
    Judgement,
    Question,
    TrainingSample,
    Trajectory,
)
from moopd.workflows.rollout import Job, Team, run_workflows
from tests.support import OnePassage, tiny_policy, word_tokenizer

QUESTIONS = [Question(f"q{n}", "nq", f"who {w}", (w,)) for n, w in enumerate("abcdexyz")]
ROW = TrainRow.model_validate(
    {"searcher": {"kind": "opd", "teacher": "base"}, "kl_teacher": "base"}
)


def make_task(num_steps: int = 4, **training: object) -> TrainingTask:
    values: dict[str, object] = {
        "questions_per_step": 2,
        "lr": 1e-3,
        "num_minibatches": 2,
        "validate_every": 2,
        "checkpoint_every": 2,
        "validation_questions": 4,
        "kl_placement": "after",
        **training,
    }
    return TrainingTask(
        system=System(name="opd", title="t", workflow="hierarchy", train=ROW),
        seed=7,
        num_steps=num_steps,
        training=TrainingConfig.model_validate(values),
        workflow=WorkflowConfig(hierarchy_steps=3, max_input_tokens=256, max_output_tokens=6),
        evaluation=EvaluationConfig(),
        train_questions=QUESTIONS,
        dev_questions=QUESTIONS[:4],
        top_k=1,
    )


def make_parts(task: TrainingTask, retriever: OnePassage | None = None) -> TrainingParts:
    tokenizer = word_tokenizer()
    model = tiny_policy(tokenizer, seed=1)
    return TrainingParts(
        trainer=TorchTrainer(model, tokenizer, task.training),
        engine=LocalEngine(model, tokenizer),
        teachers={"base": LocalEngine(tiny_policy(tokenizer, seed=2), tokenizer)},
        retriever=retriever or OnePassage(),
        renderer=Renderer(tokenizer),
        prompts=Prompts("compact"),
    )


def test_same_seed_same_losses_and_weights(tmp_path: Path) -> None:
    task = make_task()
    results = [train(task, make_parts(task), tmp_path / n, lambda *_: None) for n in "ab"]
    assert results[0].history == results[1].history
    assert results[0].last.sha256 == results[1].last.sha256
    assert len(results[0].history) == 1 + 4


def test_of_equal_scores_the_earlier_step_is_kept_and_nothing_that_was_replaced(
    tmp_path: Path,
) -> None:
    # An untrained policy answers nothing: 0 at steps 2 and 4.
    task = make_task()
    result = train(task, make_parts(task), tmp_path, lambda *_: None)
    assert [entry["dev/em"] for entry in result.history if "dev/em" in entry] == [0.0] * 3
    assert (result.best.step, result.last.step) == (2, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"best_000002", "step_000004"}


def test_a_better_step_takes_the_place_of_the_best_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = iter((0.0, 0.25, 0.5))  # before the first update, after steps 2 and 4
    monkeypatch.setattr(
        loop, "_validation_metrics", lambda *_: {"dev/em": next(scores), "dev/no_search": 0.0}
    )
    task = make_task()
    assert train(task, make_parts(task), tmp_path, lambda *_: None).best.step == 4
    assert {path.name for path in tmp_path.iterdir()} == {"best_000004", "step_000004"}


def test_every_validation_asks_the_same_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def spy(jobs: Sequence[Job], team: Team, *machinery: Any) -> list[Trajectory]:
        if team.num_candidates == 1:
            asked.append([job.question.id for job in jobs])
        return run_workflows(jobs, team, *machinery)

    monkeypatch.setattr(loop, "run_workflows", spy)
    task = replace(make_task(num_steps=2, validation_questions=3), dev_questions=QUESTIONS)
    train(task, make_parts(task), tmp_path, lambda *_: None)
    # Before the first update and after the second.
    assert len(asked) == 2 and asked[0] == asked[1]
    assert len(asked[0]) == 3


def test_no_workflow_and_no_update_of_a_training_shares_its_seed(tmp_path: Path) -> None:
    task = make_task(num_steps=2)
    parts = make_parts(task)
    sampled: list[int] = []
    shuffled: list[int] = []

    class Engine(LocalEngine):
        def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
            # Validation repeats its own seeds on purpose, at another temperature.
            sampled.extend(r.seed for r in requests if r.temperature == 1.0)
            return super().generate(requests)

    class Trainer(TorchTrainer):
        def update(self, samples: Sequence[TrainingSample], seed: int) -> dict[str, float]:
            shuffled.append(seed)
            return super().update(samples, seed)

    tokenizer = word_tokenizer()
    model = tiny_policy(tokenizer, seed=1)
    spies = replace(
        parts, engine=Engine(model, tokenizer), trainer=Trainer(model, tokenizer, task.training)
    )
    train(task, spies, tmp_path, lambda *_: None)
    # 2 steps of 2 questions of 5 workflows, at least one call each.
    assert len(set(sampled)) == len(sampled) >= 20
    assert len(set(shuffled)) == len(shuffled) == 2


def test_a_question_that_two_epochs_bring_into_one_step_is_one_group(tmp_path: Path) -> None:
    task = replace(make_task(num_steps=1), train_questions=QUESTIONS[:1])
    result = train(task, make_parts(task), tmp_path, lambda *_: None)
    assert result.last.step == 1


def test_cut_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    task = make_task()
    whole = train(task, make_parts(task), tmp_path / "whole", lambda *_: None)

    class Cut(Exception):
        pass

    def cut_at_three(step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            raise Cut

    with pytest.raises(Cut):
        train(task, make_parts(task), tmp_path / "cut", cut_at_three)
    resumed = train(task, make_parts(task), tmp_path / "cut", lambda *_: None)
    assert resumed.history == whole.history
    assert resumed.last.sha256 == whole.last.sha256
    assert resumed.best.sha256 == whole.best.sha256


class Judge:
    """Reports are adequate; the endpoint is gone at its `lost_at`-th call."""

    def __init__(self, lost_at: int | None = None) -> None:
        self.lost_at = lost_at
        self.calls = 0

    def judge(self, reports: Sequence[ReportToJudge]) -> list[Judgement | None]:
        self.calls += 1
        if self.calls == self.lost_at:
            raise JudgeError("the judge: gone")
        return [Judgement(1, "") for _ in reports]


def test_a_judge_that_is_lost_costs_the_step_and_nothing_else(tmp_path: Path) -> None:
    row = TrainRow.model_validate({"searcher": {"kind": "critic"}, "kl_teacher": "base"})
    task = make_task()
    task = replace(task, system=task.system.model_copy(update={"train": row}))

    def attempt(folder: str, judge: Judge) -> TrainingResult:
        parts = replace(make_parts(task), judge=judge)
        return train(task, parts, tmp_path / folder, lambda *_: None)

    whole = attempt("whole", Judge())
    with pytest.raises(JudgeError):
        attempt("cut", Judge(lost_at=4))
    again = Judge()
    resumed = attempt("cut", again)
    # Steps 1 and 2 are in the checkpoint: 3 and 4 are judged again.
    assert again.calls == 2
    assert (resumed.history, resumed.last.sha256) == (whole.history, whole.last.sha256)


def test_resume_at_the_end_does_nothing_and_says_the_same(tmp_path: Path) -> None:
    task = make_task()
    first = train(task, make_parts(task), tmp_path, lambda *_: None)
    steps: list[int] = []
    again = train(task, make_parts(task), tmp_path, lambda step, _: steps.append(step))
    assert (steps, again.last.sha256) == ([], first.last.sha256)
    assert again.last.step == 4


def test_epochs_are_permutations_and_steps_continue_across_them() -> None:
    seen = [q.id for step in (1, 2, 3, 4) for q in questions_of_step(QUESTIONS, 4, step, 0)]
    assert sorted(seen[:8]) == sorted(seen[8:]) == sorted(q.id for q in QUESTIONS)
    assert seen[:8] != seen[8:]


def test_failing_retrieval_fails_the_stage_and_names_the_cause(tmp_path: Path) -> None:
    class Down(OnePassage):
        def search(self, queries: object, top_k: int) -> list[list[object]]:  # type: ignore[override]
            raise RetrievalError("status 500")

    from moopd.trainers.loop import check_retrieval
    from tests.support import SEARCH, Script, team

    tokenizer = word_tokenizer()
    trajectories = run_workflows(
        [Job(QUESTIONS[0], 0, 1)], team("cascade", tokenizer),
        Script(tokenizer, lambda *_: SEARCH), Down(),
    )  # fmt: skip
    with pytest.raises(RetrievalError, match=r"5 of 5 .* status 500"):
        check_retrieval(trajectories, 0.01)


def test_a_mismatch_over_the_limit_stops_with_the_figure(tmp_path: Path) -> None:
    task = make_task(max_mismatch=0.0)
    parts = make_parts(task)
    other = LocalEngine(tiny_policy(word_tokenizer(), seed=3), word_tokenizer())
    broken = TrainingParts(**{**parts.__dict__, "engine": other, "recompute_old": True})
    with pytest.raises(MismatchError, match="step 1: mean"):
        train(task, broken, tmp_path, lambda *_: None)


def test_a_changed_frozen_checkpoint_is_refused(tmp_path: Path) -> None:
    task = make_task(num_steps=2)
    last = train(task, make_parts(task), tmp_path, lambda *_: None).last
    assert verify(last) == Path(last.path)
    weights = next(Path(last.path).glob("model*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match="expected"):
        verify(last)
    with pytest.raises(CheckpointError, match="holds no model"):
        reference("s", 0, tmp_path)
    with pytest.raises(CheckpointError, match="nothing"):
        verify(CheckpointRef("s", 0, str(tmp_path / "gone"), "0"))
