"""The training loop: sample questions, roll out, credit, update, validate, keep; resumable.

Every random choice derives from (seed, step), so a run that is cut and resumed from its last
checkpoint makes the same updates as one that was not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from moopd.config import EvaluationConfig, SamplingConfig, TrainingConfig, WorkflowConfig
from moopd.engines.base import Engine
from moopd.retrieval.base import RetrievalError, Retriever
from moopd.rl.advantages import CreditConfig
from moopd.rl.critic import Judge, judge_trajectories
from moopd.rl.samples import CreditedBatch, build_samples, needs_judge
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.systems import System, TrainRow
from moopd.trainers import checkpoints
from moopd.trainers.base import Trainer
from moopd.trainers.behaviour import behaviour, search_collapsed
from moopd.trainers.checkpoints import TrainingState
from moopd.types import CheckpointRef, Question, Trajectory
from moopd.workflows.rollout import Job, Team, derive_seed, run_workflows

Log = Callable[[int, dict[str, float]], None]
_VALIDATION = 1
"""Marks the validation branch of the seed tree; training uses branch 0."""


class MismatchError(RuntimeError):
    """Rollout engine and trainer disagree too much about the sampled tokens."""


@dataclass(frozen=True)
class TrainingTask:
    """What is trained, on what, for how long."""

    system: System
    seed: int
    num_steps: int
    training: TrainingConfig
    workflow: WorkflowConfig
    evaluation: EvaluationConfig
    train_questions: Sequence[Question]
    dev_questions: Sequence[Question]
    top_k: int
    max_retrieval_error_share: float = 0.01

    @property
    def row(self) -> TrainRow:
        if self.system.train is None:
            raise ValueError(f"system {self.system.name} is not trained; nothing to do")
        return self.system.train


@dataclass(frozen=True)
class TrainingParts:
    """The machinery: policy, engine that samples from it, frozen teachers, retriever, judge."""

    trainer: Trainer
    engine: Engine
    teachers: Mapping[str, Engine]
    retriever: Retriever
    renderer: Renderer
    prompts: Prompts
    judge: Judge | None = None
    recompute_old: bool = False
    """True for an engine whose numerics differ from the trainer's."""
    max_live: int = 512


@dataclass(frozen=True)
class TrainingResult:
    best: CheckpointRef
    last: CheckpointRef
    history: tuple[dict[str, float], ...]


def train(task: TrainingTask, parts: TrainingParts, work: Path, log: Log) -> TrainingResult:
    """Run or resume training under `work`; returns the best-validation and the last checkpoint."""
    work.mkdir(parents=True, exist_ok=True)
    state = _start(task, parts, work, log)
    while state.step < task.num_steps:
        step = state.step + 1
        metrics = _train_step(task, parts, step)
        state = replace(state, step=step, history=(*state.history, {"step": step, **metrics}))
        log(step, metrics)
        if step % task.training.validate_every == 0 or step == task.num_steps:
            state = _validate(task, parts, state, work, log)
        if step % task.training.checkpoint_every == 0 or step == task.num_steps:
            _keep(parts.trainer, work, state)
    return _finish(task, work, state)


def questions_of_step(
    questions: Sequence[Question], per_step: int, step: int, seed: int
) -> list[Question]:
    """The questions of update `step` (from 1): consecutive cuts of seeded epoch permutations."""
    if not questions:
        raise ValueError("no training questions; check the data manifest")
    first = (step - 1) * per_step
    chosen = []
    for position in range(first, first + per_step):
        epoch, offset = divmod(position, len(questions))
        chosen.append(questions[_epoch_order(len(questions), seed, epoch)[offset]])
    return chosen


@lru_cache(maxsize=4)
def _epoch_order(num_questions: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = np.random.default_rng([seed & 0x7FFFFFFF, epoch]).permutation(num_questions)
    return tuple(order.tolist())


def credit_config(training: TrainingConfig) -> CreditConfig:
    return CreditConfig(
        group_size=training.group_size,
        beta=training.beta,
        kl_coef=training.kl_coef,
        kl_placement=training.kl_placement,
        advantage_scope=training.advantage_scope,
    )


def _start(task: TrainingTask, parts: TrainingParts, work: Path, log: Log) -> TrainingState:
    latest = checkpoints.latest_step(work)
    if latest is not None:
        state = parts.trainer.restore(latest)
        parts.trainer.publish(parts.engine)
        return state
    parts.trainer.publish(parts.engine)
    metrics = _validation_metrics(task, parts)
    log(0, metrics)
    return TrainingState(step=0, history=({"step": 0, **metrics},))


def _train_step(task: TrainingTask, parts: TrainingParts, step: int) -> dict[str, float]:
    trajectories = _roll_out(task, parts, step)
    batch = _credit(task, parts, trajectories)
    mismatch = batch.metrics["rollout_mismatch"]
    if mismatch > task.training.max_mismatch:
        raise MismatchError(
            f"step {step}: mean |old - rollout| log-probability is {mismatch:.3f}, limit "
            f"{task.training.max_mismatch}; check weight sync and dtype of the rollout engine"
        )
    update = parts.trainer.update(batch.samples, derive_seed(task.seed, 0, step))
    parts.trainer.publish(parts.engine)
    did = behaviour(trajectories)
    return {
        **{f"train/{name}": value for name, value in did.items()},
        **{f"credit/{name}": value for name, value in batch.metrics.items()},
        **{f"update/{name}": value for name, value in update.items()},
    }


def _roll_out(task: TrainingTask, parts: TrainingParts, step: int) -> list[Trajectory]:
    training = task.training
    questions = questions_of_step(
        task.train_questions, training.questions_per_step, step, task.seed
    )
    # A question that two epochs bring into one step must still form one group of its own.
    distinct = list({question.id: question for question in questions}.values())
    jobs = [
        Job(question, member, derive_seed(task.seed, 0, step, number, member))
        for number, question in enumerate(distinct)
        for member in range(training.group_size)
    ]
    return _run(task, parts, jobs, training.sampling, training.num_candidates)


def _run(
    task: TrainingTask,
    parts: TrainingParts,
    jobs: Sequence[Job],
    sampling: SamplingConfig,
    num_candidates: int,
) -> list[Trajectory]:
    team = Team(
        task.system.workflow,
        task.workflow,
        parts.prompts,
        parts.renderer,
        sampling,
        num_candidates,
        task.top_k,
    )
    trajectories = run_workflows(jobs, team, parts.engine, parts.retriever, parts.max_live)
    check_retrieval(trajectories, task.max_retrieval_error_share)
    return trajectories


def check_retrieval(trajectories: Sequence[Trajectory], max_share: float) -> None:
    """Raises RetrievalError when more than `max_share` of the retrievals failed."""
    retrievals = [r for trajectory in trajectories for r in trajectory.retrievals]
    failed = [r for r in retrievals if r.error is not None]
    if retrievals and len(failed) / len(retrievals) > max_share:
        raise RetrievalError(
            f"{len(failed)} of {len(retrievals)} retrievals failed, at most {max_share:.1%} may; "
            f"first cause: {failed[0].error}"
        )


def _credit(
    task: TrainingTask, parts: TrainingParts, trajectories: Sequence[Trajectory]
) -> CreditedBatch:
    judgements = None
    if needs_judge(task.row):
        if parts.judge is None:
            raise ValueError(f"system {task.system.name} needs a judge; set critic.kind")
        judgements = judge_trajectories(parts.judge, trajectories)
    return build_samples(
        trajectories,
        task.row,
        credit_config(task.training),
        parts.teachers,
        judgements,
        rescore=parts.trainer.score if parts.recompute_old else None,
        importance_cap=task.training.importance_cap,
    )


def _validation_metrics(task: TrainingTask, parts: TrainingParts) -> dict[str, float]:
    """One attempt a development question at evaluation sampling."""
    order = np.random.default_rng(0).permutation(len(task.dev_questions))
    chosen = sorted(order[: task.training.validation_questions].tolist())
    questions = [task.dev_questions[number] for number in chosen]
    jobs = [
        Job(question, 0, derive_seed(task.seed, _VALIDATION, number))
        for number, question in enumerate(questions)
    ]
    trajectories = _run(task, parts, jobs, task.evaluation.sampling, num_candidates=1)
    return {f"dev/{name}": value for name, value in behaviour(trajectories).items()}


def _validate(
    task: TrainingTask, parts: TrainingParts, state: TrainingState, work: Path, log: Log
) -> TrainingState:
    metrics = _validation_metrics(task, parts)
    alarm = search_collapsed([*state.history, metrics])
    metrics["dev/search_collapse"] = float(alarm)
    log(state.step, metrics)
    last = {**state.history[-1], **metrics}
    state = replace(state, history=(*state.history[:-1], last))
    if metrics["dev/em"] <= state.best_score:
        return state
    state = replace(state, best_step=state.step, best_score=metrics["dev/em"])
    parts.trainer.save(work / f"best_{state.step:06d}", state)
    return state


def _keep(trainer: Trainer, work: Path, state: TrainingState) -> None:
    """Write the resume point, then drop what it replaces."""
    current = work / f"step_{state.step:06d}"
    trainer.save(current, state)
    best = f"best_{state.best_step:06d}"
    for path in work.iterdir():
        stale_step = path.name.startswith("step_") and path != current
        stale_best = path.name.startswith("best_") and path.name != best
        if stale_step or stale_best:
            shutil.rmtree(path)


def _finish(task: TrainingTask, work: Path, state: TrainingState) -> TrainingResult:
    last = work / f"step_{state.step:06d}"
    best = work / f"best_{state.best_step:06d}"
    name = task.system.name
    return TrainingResult(
        best=checkpoints.reference(name, state.best_step, best),
        last=checkpoints.reference(name, state.step, last),
        history=state.history,
    )
