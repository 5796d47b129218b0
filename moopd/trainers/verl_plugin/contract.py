"""What the plug-in assumes about verl's private parts, as a list that can be checked.

Run in verl's environment: `python -m moopd.trainers.verl_plugin.contract`.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from moopd.trainers.verl_plugin.spec import VERL_VERSION


@dataclass(frozen=True, slots=True)
class Signature:
    """A function that is overridden or called, and its parameter names."""

    module: str
    name: str
    parameters: tuple[str, ...]
    variadic: bool = False
    """Only the leading parameters count."""


@dataclass(frozen=True, slots=True)
class Phrase:
    """Text that the source of a function must hold: what the plug-in hooks into is not an API."""

    module: str
    name: str
    text: str
    reason: str


_TRAINER = "verl.trainer.ppo.v1.trainer_base"
_WORKERS = "verl.workers.engine_workers"
_LOOP = "verl.experimental.agent_loop.agent_loop"

SIGNATURES = (
    Signature(_TRAINER, "PPOTrainer._init_resource_pool_mgr", ("self",)),
    Signature(_TRAINER, "PPOTrainer._get_required_batch_multiple", ("self", "dp_size")),
    Signature(_TRAINER, "PPOTrainer._compute_ref_log_prob", ("self", "batch", "metrics")),
    Signature(_TRAINER, "PPOTrainer._compute_advantage", ("self", "batch", "metrics")),
    Signature(_TRAINER, "PPOTrainer._update_actor", ("self", "batch", "metrics")),
    Signature(_TRAINER, "PPOTrainer._validate", ("self",)),
    Signature(
        _TRAINER,
        "PPOTrainer._val_metrics_update",
        (
            "self",
            "data_sources",
            "sample_uids",
            "reward_extra_infos_dict",
            "sample_turns",
            "expected_acc_counts",
        ),
    ),
    Signature(_LOOP, "AgentLoopBase.run", ("self", "sampling_params", "kwargs")),
    Signature(
        "verl.workers.rollout.llm_server",
        "LLMServerClient.generate",
        ("self", "request_id", "prompt_ids", "sampling_params"),
        variadic=True,
    ),
    Signature(
        "verl.trainer.ppo.rollout_corr_helper",
        "compute_rollout_correction_and_add_to_batch",
        ("batch", "rollout_corr_config"),
    ),
    Signature("verl.workers.utils.padding", "response_from_nested", ("tensor", "response_mask")),
    Signature(_WORKERS, "TrainingWorker.infer_batch", ("self", "data")),
    Signature(_WORKERS, "TrainingWorker.train_mini_batch", ("self", "data")),
)

PHRASES = (
    Phrase(
        _WORKERS,
        "ActorRolloutRefWorker.init_model",
        "self.ref = self.ref_worker_cls(config=",
        "the frozen teacher takes the place of the reference model there",
    ),
    Phrase(
        _TRAINER,
        "PPOTrainer._validate",
        "self._val_metrics_update(",
        "development scores are taken there",
    ),
    Phrase(
        _TRAINER,
        "PPOTrainer._balance_batch",
        "self._get_required_batch_multiple(",
        "five equal minibatches depend on the padding there",
    ),
    Phrase(
        "verl.trainer.ppo.padding_utils",
        "construct_minimal_padding_template",
        "is_padding=True",
        "padding rows are told apart by that tag",
    ),
    Phrase(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngine.forward_backward_batch",
        'data["loss_mask"].sum()',
        "the loss is divided by the tokens of that mask",
    ),
    Phrase(
        "verl.workers.engine.fsdp.transformer_impl",
        "FSDPEngineWithLMHead.forward_step",
        "use_cache=False",
        "with a cache transformers would no longer tell rows apart that lie end to end",
    ),
    Phrase(
        "transformers.masking_utils",
        "_preprocess_mask_arguments",
        "find_packed_sequence_indices(position_ids)",
        "without flash attention the rows of a microbatch are told apart there",
    ),
    Phrase(
        _WORKERS,
        "TrainingWorker.train_mini_batch",
        'key="mini_batch_size"',
        "the size of our minibatches is passed under that name",
    ),
    Phrase(
        "verl.trainer.ppo.v1.agent_loop_tq",
        "AgentLoopWorkerTQ._agent_loop_postprocess",
        "{uid}_{session_id}_{i}",
        "several outputs of one workflow are stored under such keys",
    ),
)


def broken_assumptions() -> list[str]:
    """One sentence per assumption that the installed verl does not meet; empty is good."""
    found = version("verl")
    if found != VERL_VERSION:
        return [f"verl is {found}, expected {VERL_VERSION}: install the pinned version"]
    return [
        message
        for message in (*map(_check_signature, SIGNATURES), *map(_check_phrase, PHRASES))
        if message is not None
    ]


def _check_signature(wanted: Signature) -> str | None:
    function = _resolve(wanted.module, wanted.name)
    if function is None:
        return _missing(wanted.module, wanted.name)
    got = tuple(inspect.signature(inspect.unwrap(function)).parameters)
    compared = got[: len(wanted.parameters)] if wanted.variadic else got
    if compared == wanted.parameters:
        return None
    return (
        f"{wanted.module}.{wanted.name} takes ({', '.join(got)}), expected "
        f"({', '.join(wanted.parameters)}); the plug-in overrides or calls it, so adapt it there"
    )


def _check_phrase(wanted: Phrase) -> str | None:
    function = _resolve(wanted.module, wanted.name)
    if function is None:
        return _missing(wanted.module, wanted.name)
    if wanted.text in inspect.getsource(inspect.unwrap(function)):
        return None
    return (
        f"{wanted.module}.{wanted.name} no longer holds {wanted.text!r}: {wanted.reason}; "
        "read how verl does it now and adapt the plug-in"
    )


def _missing(module: str, name: str) -> str:
    return f"{module}.{name} is gone; the plug-in needs it, so find what took its place"


def _resolve(module: str, name: str) -> Any:
    """The named function, or None where there is none."""
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
        # Ray wraps actor classes; the class itself lies underneath.
        found = getattr(found, "__ray_actor_class__", found)
    return found


def main() -> None:
    broken = broken_assumptions()
    for message in broken:
        print(message)
    raise SystemExit(1 if broken else 0)


if __name__ == "__main__":
    main()
