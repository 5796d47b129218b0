"""One scale = one YAML file = one `Scale`. Unknown keys are errors; sections hash by content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError


class ConfigError(ValueError):
    """A config that cannot be run; the message says got, expected, what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def digest(self) -> str:
        """sha256 over the canonical JSON of this section."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


MAX_HOURS = 24.0 * 366
"""A deadline beyond a year is a slip; timers of the system refuse centuries."""
Seed = Annotated[int, Field(ge=0, lt=2**31)]
"""Training seeds count up from the scale's, so that they stay what every library takes."""
Size = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class WorldConfig(Section):
    """The synthetic world (scale tiny); see docs/tiny.md."""

    seed: Seed = 0
    num_entities: int = Field(240, ge=20)
    num_train: int = Field(1200, ge=1)
    num_dev: int = Field(96, ge=1)
    test_per_dataset: int = Field(30, ge=1)


class DataConfig(Section):
    source: Literal["world", "files", "hub"] = "world"
    path: str | None = None
    """Folder with questions.* and corpus.* (source: files)."""
    corpus: str | None = None
    """Corpus file or hub name where it is not in `path`."""
    world: WorldConfig = WorldConfig()
    clean: Literal["full", "malformed"] = "full"
    overlap: Literal["drop_test", "drop_train"] = "drop_test"
    train_datasets: tuple[str, ...] = ("nq", "hotpotqa")
    test_sizes: dict[str, Annotated[int, Field(ge=0)]] = {}
    """Test questions per dataset after removal (seeded sample); empty: all."""
    dev_size: int = Field(96, ge=1)
    train_size: Size | None = None
    """Seeded sample of the training questions; None: all."""
    require_support: bool = False
    """Keep only questions whose supporting passages are known (small local corpora)."""
    expected_rows: dict[str, int] = {}
    """`dataset/split` -> rows that must be read (paper: nq/train 79168, hotpotqa/train 90447)."""
    sample_seed: Seed = 0


class EncoderConfig(Section):
    kind: Literal["hashing", "e5"] = "hashing"
    model: str | None = None
    dimension: Size = 512
    query_prefix: str = "query: "
    passage_prefix: str = "passage: "
    max_tokens: Size = 512
    batch_size: Size = 256


class RetrievalConfig(Section):
    kind: Literal["dense", "lexical", "remote"] = "dense"
    encoder: EncoderConfig = EncoderConfig()
    top_k: int = Field(3, ge=1)
    shard_size: int = Field(100_000, ge=1)
    device: Literal["cpu", "gpu", "auto"] = "cpu"
    url: str | None = None
    max_error_share: float = Field(0.01, ge=0, le=1)
    """A stage whose share of failed retrievals passes this fails."""


class ModelConfig(Section):
    kind: Literal["tiny", "pretrained"] = "tiny"
    path: str | None = None
    """Folder, hub name or GGUF file (kind: pretrained)."""
    prompt_style: Literal["compact", "chat"] = "compact"
    dtype: Literal["float32", "bfloat16"] = "float32"
    hidden_size: Size = 96
    num_layers: Size = 2
    num_heads: Size = 4
    num_kv_heads: Size = 2
    init_std: Positive = 0.06
    """Of all weights of a tiny model: at the usual 0.02 copying emerges too late."""
    rope_theta: Positive = 10_000.0


class TraceNoise(Section):
    """How imperfect the scripted warm-start traces are: each a probability."""

    no_search: Share = 0.20
    query_noise: Share = 0.12
    summary_noise: Share = 0.15
    one_more_search: Share = 0.45
    repeated_search: Share = 0.06
    format_slip: Share = 0.03
    answers_directly: Share = 0.15
    passes_whole_question: Share = 0.30
    extra_task: Share = 0.10
    drops_report: Share = 0.15
    answer_right: Share = 0.75
    answer_wrong: Share = 0.17


class WarmStartConfig(Section):
    enabled: bool = True
    num_traces: int = Field(6000, ge=0)
    steps: int = Field(550, ge=0)
    lr: Positive = 3e-3
    tokens_per_batch: Size = 4000
    drill_steps: int = Field(0, ge=0)
    """First steps that repeat random words, from which copying emerges; part of `steps`."""
    drill_share: float = Field(0.0, ge=0, lt=1)
    """Share of drills among the later batches."""
    context_weight: NotNegative = 0.1
    """Loss weight of tokens the policy did not generate."""
    gradient_checkpointing: bool = False
    noise: TraceNoise = TraceNoise()


class WorkflowConfig(Section):
    cascade_steps: int = Field(5, ge=1)
    hierarchy_steps: int = Field(12, ge=1)
    leader_rounds: int = Field(5, ge=1)
    max_subtasks_per_round: int = Field(4, ge=1)
    max_input_tokens: int = Field(8192, ge=1)
    max_output_tokens: int = Field(512, ge=1)
    max_passage_words: int = Field(200, ge=1)
    """A longer passage is truncated (tags stay, the cut is counted)."""


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)


class TrainingConfig(Section):
    trainer: Literal["torch", "packed", "verl"] = "torch"
    """torch: padded batches, any device; packed: one GPU; verl: a cluster."""
    questions_per_step: int = Field(32, ge=1)
    group_size: int = Field(5, ge=1)
    num_candidates: int = Field(5, ge=1)
    num_minibatches: int = Field(5, ge=1)
    lr: Positive = 1e-6
    clip_ratio: Positive = 0.2
    dual_clip: Positive = 3.0
    entropy_coef: NotNegative = 0.001
    grad_clip: Positive = 1.0
    beta: NotNegative = 0.01
    kl_coef: NotNegative = 0.001
    kl_placement: Literal["before", "after"] = "before"
    advantage_scope: Literal["per_workflow", "per_call"] = "per_workflow"
    stage1_steps: int = Field(500, ge=1)
    stage2_steps: int = Field(500, ge=1)
    validate_every: int = Field(20, ge=1)
    checkpoint_every: int = Field(20, ge=1)
    validation_questions: int = Field(96, ge=1)
    tokens_per_microbatch: int = Field(8192, ge=1)
    merge_samples: bool = True
    importance_cap: Positive = 2.0
    """Truncated importance correction where the rollout engine's numerics differ."""
    max_mismatch: NotNegative = 0.5
    """Mean |old - rollout| log-probability above which a run stops."""
    sampling: SamplingConfig = SamplingConfig()
    gradient_checkpointing: bool = False
    compile_layers: bool = False
    """Packed trainer on a GPU: torch.compile of the decoder layers."""


class EvaluationConfig(Section):
    attempts: int = Field(4, ge=1)
    sampling: SamplingConfig = SamplingConfig(temperature=0.6, top_p=0.95)
    max_live_workflows: int = Field(256, ge=1)


class StatisticsConfig(Section):
    num_draws: int = Field(4000, ge=1)
    confidence: float = Field(0.95, gt=0, lt=1)
    seed: Seed = 0
    reference: str = "multiagent_opd"
    """Row that differences are taken from; the first row of the table where it is absent."""
    num_cases: int = Field(24, ge=0)
    """Questions in the report's case viewer."""


class CriticConfig(Section):
    """Who judges reports in the Prompted Critic row."""

    kind: Literal["base_model", "http"] = "base_model"
    url: str | None = None
    model: str | None = None
    max_retries: int = Field(2, ge=0)
    """Times a malformed verdict is asked for again; after them its report has none."""
    timeout_s: float = Field(60.0, gt=0)
    """One try of a request to the endpoint."""
    max_tries: int = Field(5, ge=1)
    """Tries of one request; after them the endpoint counts as down and the step is refused."""
    max_concurrent: int = Field(16, ge=1)
    """Requests in flight from one process."""


JUDGE_PLACE = ("url", "timeout_s", "max_tries", "max_concurrent")
"""Fields of `critic` that say how the judge is reached, not who it is: they change no result."""


class EngineConfig(Section):
    kind: Literal["local", "sglang"] = "local"
    url: str | None = None
    device: Literal["cpu", "cuda", "auto"] = "cpu"
    num_threads: int = Field(1, ge=1)
    """CPU threads of a stage's process; independent stages already run side by side."""
    options: dict[str, str | int | float | bool | list[int]] = {}


class VerlConfig(Section):
    """The distributed trainer's machine side (training.trainer: verl); see docs/verl.md."""

    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int = Field(8, ge=1)
    """Training processes of one host; on the CPU they only stand for GPUs."""
    rollout_tensor_parallel: int = Field(1, ge=1)
    gpu_memory_utilization: float = Field(0.5, gt=0, lt=1)
    """Share of the memory that is free when the rollout engine starts."""
    max_running_requests: int = Field(256, ge=1)
    """Concurrent requests of one rollout engine; CUDA graphs are captured up to this number."""
    attention: Literal["flash_attention_2", "sdpa"] = "flash_attention_2"
    sglang_attention: str = "triton"
    sglang_sampling: str = "pytorch"
    """Engine back ends that need no compiler at run time."""
    offload_optimizer: bool = False
    """Adam's state rests on the host between updates, which leaves the rollout engine its room."""
    agent_workers: int = Field(8, ge=1)
    storage_units: int = Field(8, ge=1)
    """Processes of verl's queue; more than the host has cores for can hang its start."""
    deadline_hours: float = Field(240.0, gt=0, le=MAX_HOURS)
    """A stage that takes longer is ended and counts as failed."""
    call_timeout_s: float = Field(600.0, gt=0)
    """A rollout call that takes longer fails the step, so that no session hangs for ever."""
    keep_rows: bool = False
    """Write what every step trained on beside the metrics (rows/), to compare or to look at."""
    overrides: tuple[str, ...] = ()
    """verl's own `key=value` overrides, applied last."""


class Scale(Section):
    """Everything that decides a run, apart from the system."""

    name: str
    description: str = ""
    caution: str = ""
    """Printed above the tables of a scale whose scores must not be taken for results."""
    deadline_hours: float = Field(6.0, gt=0, le=MAX_HOURS)
    """A stage that takes longer is cut and fails; the next run goes on from its checkpoint."""
    seed: Seed = 0
    systems: tuple[str, ...] = ()
    """Rows of systems.yaml to run; empty: all."""
    data: DataConfig = DataConfig()
    retrieval: RetrievalConfig = RetrievalConfig()
    model: ModelConfig = ModelConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    workflow: WorkflowConfig = WorkflowConfig()
    engine: EngineConfig = EngineConfig()
    training: TrainingConfig = TrainingConfig()
    critic: CriticConfig = CriticConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    statistics: StatisticsConfig = StatisticsConfig()
    verl: VerlConfig = VerlConfig()


def load_scale(path: Path, overrides: Sequence[str] = ()) -> Scale:
    """Read configs/scale/NAME.yaml and apply `a.b=value` overrides (values are YAML).

    Raises ConfigError naming the file, the key, what was got and what is known.
    """
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise ConfigError(f"no scale {path.stem!r} ({path}); known: {known}")
    tree = read_mapping(path)
    for override in overrides:
        _apply(tree, override)
    try:
        return Scale.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_explain(error)}") from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, value = override.partition("=")
    if not separator:
        raise ConfigError(f"override {override!r}: expected section.key=value")
    *parents, last = key.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {name!r} is a value, not a section")
    tree[last] = _yaml(value, f"override {override!r}")


def read_mapping(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values. Raises ConfigError for anything else."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}); expected a YAML file") from None
    tree = _yaml(text, str(path)) or {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: got a {type(tree).__name__}, expected `key: value` lines")
    return tree


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        cause = " ".join(str(error).split())[:200]
        raise ConfigError(f"{where}: expected YAML; put text in quotes ({cause})") from None


def _explain(error: ValidationError) -> str:
    lines = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(
                f"unknown key {where!r}; known here: {', '.join(_known_keys(item['loc']))}"
            )
        else:
            lines.append(f"{where}: {item['msg']} (got {_cut(item['input'])})")
    return "; ".join(lines)


def _cut(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _known_keys(location: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Scale
    for part in location[:-1]:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
