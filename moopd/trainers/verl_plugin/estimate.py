"""What a scale costs: memory, disk, tokens and hours, from the config and measured throughputs.

Every figure carries its formula, so that a reader can redo it by hand (docs/scale.md). Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moopd.config import ConfigError, Scale
from moopd.systems import System

GB = 1e9
HEAD_CHUNK = 512
"""Tokens whose logits exist at the same time in verl's chunked head (FusedLinearForPPO)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What memory and arithmetic depend on."""

    parameters: float
    layers: int
    hidden: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers in bfloat16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


KNOWN_SHAPES = {"Qwen/Qwen3-4B-Instruct-2507": ModelShape(4.02e9, 36, 2560, 8, 128, 151_936)}


@dataclass(frozen=True, slots=True)
class Measured:
    """Throughputs of one GPU; docs/scale.md says which defaults were measured on an H200."""

    rollout_tokens_per_s: float = 50_970.0
    """SGLang, Qwen3-4B shape, 160 live workflows, prefix cache on: 719,159 prompt and 135,099 new
    tokens in 16.76 s (docs/performance.md)."""
    train_flops: float = 1.5e14
    """verl's log-probability and update passes, Qwen3-4B shape, sdpa: (2 + 8) x parameters x
    131,200 tokens in 36.0 s (docs/verl.md)."""
    weight_sync_s: float = 1.8
    start_s: float = 132.0
    search_bytes_per_s: float = 1.0e11
    """Assumed: memory bandwidth of the host that scans the flat index."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Means per workflow. Tokens and searches: the paper's (section 4.5); the rest: assumed."""

    searches: float = 5.39
    input_tokens: float = 9_172
    output_tokens: float = 697
    subtasks: float = 3.0
    leader_turns: float = 2.5
    answer_prompt_tokens: float = 600
    answer_tokens: float = 15


CASCADE = Workload(2.86, 3_886, 400, 1.0, 0.0)
"""C-MAS + RL: searches and input tokens of section 4.5; its output tokens are assumed."""
HIERARCHY = Workload()
PASSAGES = 21_015_324
"""Passages of the 2018 Wikipedia dump in 100-word pieces."""


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    unit: str
    formula: str


def shape_of(scale: Scale) -> ModelShape:
    """Shape of the scale's model: known by name, or read from its folder."""
    path = scale.model.path or ""
    if path in KNOWN_SHAPES:
        return KNOWN_SHAPES[path]
    file = Path(path) / "config.json"
    if not path or not file.is_file():
        raise ConfigError(
            f"model.path {path!r}: got neither a known model nor a folder with config.json; "
            f"known: {', '.join(KNOWN_SHAPES)}"
        )
    return _shape_from(json.loads(file.read_text(encoding="utf-8")))


def _shape_from(config: Mapping[str, Any]) -> ModelShape:
    hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads", heads))
    head_dim = int(config.get("head_dim") or hidden // heads)
    vocabulary, inner = int(config["vocab_size"]), int(config["intermediate_size"])
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    parameters = layers * (attention + 3 * hidden * inner) + embeddings
    return ModelShape(parameters, layers, hidden, kv_heads, head_dim, vocabulary)


def memory_per_gpu(scale: Scale, shape: ModelShape) -> list[Figure]:
    """Training side of one GPU, and what one running token costs the rollout engine."""
    gpus, tokens = scale.verl.gpus, scale.training.tokens_per_microbatch
    # An optimizer kept on the host comes back for the update: it counts at the peak all the same.
    states = 16 * shape.parameters / gpus
    # Saved layer inputs, or all activations of a layer (about 17 hidden vectors a token).
    per_token = shape.layers * shape.hidden * 2
    activations = tokens * per_token * (1 if scale.training.gradient_checkpointing else 17)
    logits = HEAD_CHUNK * shape.vocabulary * (2 + 6 * 4)
    context = scale.workflow.max_input_tokens + scale.workflow.max_output_tokens
    return [
        Figure("training states", states / GB, "GB",
               f"4 B x {shape.parameters:.3g} parameters x (weights, gradients, Adam twice) "
               f"/ {gpus} GPUs"),
        Figure("activations", activations / GB, "GB",
               f"{tokens:,} tokens a microbatch x {shape.layers} layers x {shape.hidden} x 2 B"),
        Figure("logits", logits / GB, "GB",
               f"{HEAD_CHUNK} tokens at a time x {shape.vocabulary:,} x (2 + 6 x 4) B"),
        Figure("training peak", (states + activations + logits) / GB, "GB", "sum of the above"),
        Figure("rollout weights", 2 * shape.parameters / scale.verl.rollout_tensor_parallel / GB,
               "GB", "2 B x parameters / tensor parallel"),
        Figure("KV cache", shape.kv_bytes_per_token / 1e3, "kB a token",
               f"2 x {shape.layers} layers x {shape.kv_heads} heads x {shape.head_dim} x 2 B"),
        Figure("KV cache of one full prompt", shape.kv_bytes_per_token * context / GB, "GB",
               f"x {context:,} tokens"),
    ]  # fmt: skip


def tokens_per_step(scale: Scale, load: Workload) -> list[Figure]:
    """What one step samples and what its passes read."""
    training = scale.training
    workflows = training.questions_per_step * training.group_size
    extra = training.num_candidates - 1
    rows = load.searches + load.subtasks + load.leader_turns + training.num_candidates
    new = load.output_tokens + extra * load.answer_tokens
    read = load.input_tokens + extra * load.answer_prompt_tokens + new
    return [
        Figure("workflows a step", workflows, "",
               f"{training.questions_per_step} questions x {training.group_size}"),
        Figure("rows a step", workflows * rows, "",
               "workflows x (searches + reports + Leader turns + candidates) = x "
               f"({load.searches} + {load.subtasks} + {load.leader_turns} + "
               f"{training.num_candidates})"),
        Figure("new tokens a step", workflows * new, "",
               f"workflows x ({load.output_tokens:.0f} + {extra} more candidates x "
               f"{load.answer_tokens:.0f})"),
        Figure("tokens of a pass", workflows * read, "",
               f"workflows x (prompts {load.input_tokens:.0f} + {extra} x "
               f"{load.answer_prompt_tokens:.0f} + new tokens)"),
    ]  # fmt: skip


def step_seconds(
    scale: Scale, shape: ModelShape, load: Workload, teacher_passes: int, measured: Measured
) -> list[Figure]:
    """Per phase: generation at full batch, passes at the measured arithmetic."""
    named = {figure.name: figure.value for figure in tokens_per_step(scale, load)}
    gpus = scale.verl.gpus
    backward = 8 if scale.training.gradient_checkpointing else 6
    work = named["tokens of a pass"] * shape.parameters
    generation = rollout_seconds(scale, load, named["workflows a step"], measured)
    forward = 2 * work / (measured.train_flops * gpus)
    update = backward * work / (measured.train_flops * gpus)
    total = generation + forward * (1 + teacher_passes) + update + measured.weight_sync_s
    rate = f"({measured.train_flops:.1e} FLOP/s x {gpus} GPUs)"
    return [
        Figure("generation", generation, "s",
               f"tokens of a pass / ({measured.rollout_tokens_per_s:,.0f} a second x {gpus} GPUs)"),
        Figure("old log-probabilities", forward, "s", f"2 x parameters x tokens / {rate}"),
        Figure("teachers", forward * teacher_passes, "s", f"{teacher_passes} x the same"),
        Figure("update", update, "s", f"{backward} x parameters x tokens / {rate}"),
        Figure("step", total, "s", f"sum + weight sync {measured.weight_sync_s} s"),
    ]  # fmt: skip


def rollout_seconds(scale: Scale, load: Workload, workflows: float, measured: Measured) -> float:
    """Prompt and new tokens at full batch."""
    extra = scale.training.num_candidates - 1
    new = load.output_tokens + extra * load.answer_tokens
    prompts = load.input_tokens + extra * load.answer_prompt_tokens
    return workflows * (prompts + new) / (measured.rollout_tokens_per_s * scale.verl.gpus)


def disk(scale: Scale, shape: ModelShape, num_trained: int) -> list[Figure]:
    """What the run leaves on disk, and the most it needs at once."""
    policy = 4 * shape.parameters
    checkpoint = 16 * shape.parameters
    vectors = 4.0 * scale.retrieval.encoder.dimension * PASSAGES
    corpus = 650.0 * PASSAGES
    return [
        Figure("base model", 2 * shape.parameters / GB, "GB", "2 B x parameters"),
        Figure("checkpoint", checkpoint / GB, "GB",
               "4 B x parameters x (weights, Adam twice, transformers copy)"),
        Figure("checkpoints at once", 3 * checkpoint / GB, "GB", "two kept, one being written"),
        Figure("policies kept", 2 * num_trained * policy / GB, "GB",
               f"best and last of {num_trained} rows x 4 B x parameters"),
        Figure("index", vectors / GB, "GB",
               f"{PASSAGES:,} passages x {scale.retrieval.encoder.dimension} x 4 B"),
        Figure("corpus", corpus / GB, "GB", "about 650 B a passage"),
        Figure("disk", (2 * shape.parameters + 3 * checkpoint + 2 * num_trained * policy
                        + vectors + corpus) / GB, "GB", "sum"),
    ]  # fmt: skip


def hours(
    scale: Scale, systems: Mapping[str, System], shape: ModelShape, measured: Measured
) -> list[Figure]:
    """Training and evaluation of every row, and GPU hours in all."""
    figures = []
    training_h = 0.0
    for system in systems.values():
        if system.train is None:
            continue
        load = CASCADE if system.workflow == "cascade" else HIERARCHY
        first = system.train.kl_teacher is None
        steps = scale.training.stage1_steps if first else scale.training.stage2_steps
        passes = len(system.train.teachers)
        step = step_seconds(scale, shape, load, passes, measured)[-1].value
        tests = scale.training.validation_questions
        check = rollout_seconds(scale, load, tests, measured)
        checks = 1 + steps // scale.training.validate_every
        row_h = (steps * step + checks * check + measured.start_s) / 3600
        training_h += row_h
        figures.append(Figure(f"train {system.name}", row_h, "h",
                              f"{steps} steps x {step:.0f} s + {checks} validations x "
                              f"{check:.0f} s + start"))  # fmt: skip
    tests = sum(scale.data.test_sizes.values()) * scale.evaluation.attempts
    evaluated = sum(len(system.evaluated_as) for system in systems.values())
    workflows = tests * evaluated
    evaluation_h = rollout_seconds(scale, HIERARCHY, workflows, measured) / 3600
    formula = f"{evaluated} rows x {tests:,} workflows, as generation above"
    figures.append(Figure("evaluate", evaluation_h, "h", formula))
    total = (training_h + evaluation_h) * scale.verl.gpus
    figures.append(Figure("GPU hours", total, "h", f"(training + evaluation) x {scale.verl.gpus}"))
    return figures


def retrieval(scale: Scale, measured: Measured) -> list[Figure]:
    """The flat index in memory, and the time of one scan, which a batch of queries shares."""
    vectors = 4.0 * scale.retrieval.encoder.dimension * PASSAGES
    scan = vectors / measured.search_bytes_per_s
    queries = scale.training.questions_per_step * scale.training.group_size * HIERARCHY.searches
    return [
        Figure("index in memory", vectors / GB, "GB", "passages x dimension x 4 B"),
        Figure("one scan", scan, "s",
               f"index / {measured.search_bytes_per_s / GB:.0f} GB/s, shared by a batch"),
        Figure("queries a step", queries, "", f"workflows x {HIERARCHY.searches}"),
    ]  # fmt: skip


def estimate(
    scale: Scale, systems: Mapping[str, System], measured: Measured | None = None
) -> dict[str, list[Figure]]:
    """All figures by section. Raises ConfigError for a model of unknown shape."""
    seen = measured or Measured()
    shape = shape_of(scale)
    trained = [system for system in systems.values() if system.train is not None]
    return {
        "memory per GPU": memory_per_gpu(scale, shape),
        "one step (Stage II)": tokens_per_step(scale, HIERARCHY)
        + step_seconds(scale, shape, HIERARCHY, 1, seen),
        "retrieval": retrieval(scale, seen),
        "disk": disk(scale, shape, len(trained)),
        "time": hours(scale, systems, shape, seen),
    }


def render(sections: Mapping[str, list[Figure]]) -> str:
    """The figures as lines of text."""
    lines = []
    for title, figures in sections.items():
        lines.append(title)
        lines += [
            f"  {figure.name:<28}{figure.value:>14,.1f} {figure.unit:<11} {figure.formula}"
            for figure in figures
        ]
    return "\n".join(lines)
