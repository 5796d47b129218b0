"""From a scale and checkpoints to the machinery of one training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moopd.config import ConfigError, Scale, TrainingConfig
from moopd.engines.base import Engine, WeightReceiver
from moopd.engines.local import LocalEngine
from moopd.engines.models import check_same_vocabulary, load_policy
from moopd.retrieval.base import Retriever
from moopd.rl.critic import HttpJudge, Judge, PolicyJudge
from moopd.rl.samples import needs_judge
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.systems import BASE, System
from moopd.trainers.base import Trainer
from moopd.trainers.checkpoints import verify
from moopd.trainers.loop import TrainingParts, TrainingTask
from moopd.trainers.packed import FrozenScorer, PackedTrainer
from moopd.trainers.torch_trainer import TorchTrainer
from moopd.types import CheckpointRef, Question


@dataclass(frozen=True)
class Policy:
    """A loaded checkpoint."""

    model: Any
    tokenizer: Any
    device: str


def open_policy(scale: Scale, checkpoint: CheckpointRef, dtype: str | None = None) -> Policy:
    """Load a checkpoint whose weights are what its digest says."""
    device = resolve_device(scale.engine.device)
    model, tokenizer = load_policy(str(verify(checkpoint)), dtype or scale.model.dtype, device)
    return Policy(model, tokenizer, device)


def resolve_device(wanted: str) -> str:
    """`auto` takes the GPU where there is one; asking for a missing one is an error."""
    import torch

    if wanted == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise ConfigError("engine.device is cuda but torch sees no GPU; set it to auto or cpu")
    return "cpu"


def prompts_of(scale: Scale) -> Prompts:
    return Prompts(scale.model.prompt_style, scale.workflow.max_passage_words)


def training_task(
    scale: Scale,
    system: System,
    train_questions: Sequence[Question],
    dev_questions: Sequence[Question],
    seed: int,
) -> TrainingTask:
    """Stage I (no teacher to be pulled to) runs `stage1_steps`, Stage II `stage2_steps`."""
    training = scale.training
    first_stage = system.train is not None and system.train.kl_teacher is None
    return TrainingTask(
        system=system,
        seed=seed,
        num_steps=training.stage1_steps if first_stage else training.stage2_steps,
        training=training,
        workflow=scale.workflow,
        evaluation=scale.evaluation,
        train_questions=train_questions,
        dev_questions=dev_questions,
        top_k=scale.retrieval.top_k,
        max_retrieval_error_share=scale.retrieval.max_error_share,
    )


def assemble(
    scale: Scale,
    task: TrainingTask,
    base: CheckpointRef,
    teachers: Mapping[str, CheckpointRef],
    retriever: Retriever,
) -> TrainingParts:
    """Student from the base weights, frozen teachers, judge. Vocabularies are checked here."""
    packed = task.training.trainer == "packed"
    # The packed trainer keeps float32 masters of its own beside the compute dtype.
    student = open_policy(scale, base, dtype=None if packed else "float32")
    frozen: dict[str, Engine] = {}
    for name in task.row.teachers:
        teacher = open_policy(scale, base if name == BASE else teachers[name])
        check_same_vocabulary(student.model, teacher.model)
        frozen[name] = _scorer(teacher, task.training) if packed else _local(teacher)
    renderer = Renderer(student.tokenizer)
    sampler = open_sampler(scale, student, base)
    return TrainingParts(
        trainer=_trainer(student, task.training, sampler),
        engine=sampler,
        teachers=frozen,
        retriever=retriever,
        renderer=renderer,
        prompts=prompts_of(scale),
        judge=_judge(scale, base, renderer) if needs_judge(task.row) else None,
        recompute_old=scale.engine.kind == "sglang",
    )


def open_sampler(scale: Scale, policy: Policy, checkpoint: CheckpointRef) -> Engine:
    """The engine that samples from `policy`; SGLang loads the checkpoint that it came from."""
    if scale.engine.kind == "local":
        return _local(policy)
    from moopd.engines.sglang import shared_sglang

    renderer = Renderer(policy.tokenizer)
    engine = shared_sglang(scale.engine, checkpoint.path, renderer.decode, renderer.eos_token_id)
    engine.load_weights(checkpoint)
    return engine


def _trainer(student: Policy, training: TrainingConfig, sampler: Engine) -> Trainer:
    if training.trainer == "packed":
        receiver = sampler if isinstance(sampler, WeightReceiver) else None
        return PackedTrainer(student.model, student.tokenizer, training, receiver)
    return TorchTrainer(student.model, student.tokenizer, training)


def _scorer(teacher: Policy, training: TrainingConfig) -> FrozenScorer:
    return FrozenScorer(
        teacher.model, teacher.tokenizer, training.tokens_per_microbatch, training.compile_layers
    )


def _local(policy: Policy) -> LocalEngine:
    return LocalEngine(policy.model, policy.tokenizer)


def _judge(scale: Scale, base: CheckpointRef, renderer: Renderer) -> Judge:
    match scale.critic.kind:
        case "http":
            return HttpJudge(scale.critic, prompts_of(scale))
        case "base_model":
            policy = open_policy(scale, base)
            return PolicyJudge(
                _local(policy), renderer, prompts_of(scale), scale.workflow, scale.critic
            )
