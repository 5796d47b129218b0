"""Our config as verl's overrides: the one place where the two meet. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moopd.config import ConfigError, Scale
from moopd.trainers.verl_plugin.questions import DEV_FILE, TRAIN_FILE
from moopd.trainers.verl_plugin.spec import RUN_FILE, TRAINER_NAME, VerlRun
from moopd.trainers.verl_plugin.validation import CHECKPOINTS

CPU_REPLICA = "transformers_cpu"
_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"


def verl_overrides(scale: Scale, run: VerlRun, student: str, start: StartPoint) -> list[str]:
    """Hydra overrides for `python -m verl.trainer.main_ppo`; `student` is a folder."""
    check_supported(scale, run)
    settings: dict[str, Any] = {
        **_data(run),
        **_model(scale, student),
        **_actor(scale, run),
        **_rollout(scale, run),
        **_algorithm(run),
        **_trainer(scale, run, start),
        **(_cpu(scale) if scale.verl.device == "cpu" else _sglang(scale, run)),
        "+actor_rollout_ref.moopd.run_file": run.folder / RUN_FILE,
    }
    return [*(f"{key}={_text(value)}" for key, value in settings.items()), *scale.verl.overrides]


class StartPoint:
    """Where a run starts: from scratch, or from the checkpoint of `step`."""

    def __init__(self, step: int, num_steps: int, validated: bool) -> None:
        self.step = step
        self.validate_first = not validated
        """Step 0, or a saved step whose validation was cut off."""
        self.only_validate = step == num_steps


def check_supported(scale: Scale, run: VerlRun) -> None:
    """Raises ConfigError for what verl cannot run as the config says."""
    training = run.training
    if training.validate_every % training.checkpoint_every:
        raise ConfigError(
            f"training.validate_every is {training.validate_every}, expected a multiple of "
            f"checkpoint_every ({training.checkpoint_every}): only a saved step can be the best"
        )
    if run.row.searcher.kind == "critic" and run.critic.kind != "http":
        raise ConfigError(
            f"critic.kind is {run.critic.kind}, expected http with critic.url: under verl the "
            "judge answers behind an OpenAI-compatible endpoint"
        )
    if scale.verl.gpus % scale.verl.rollout_tensor_parallel:
        raise ConfigError(
            f"verl.gpus ({scale.verl.gpus}) must be a multiple of verl.rollout_tensor_parallel "
            f"({scale.verl.rollout_tensor_parallel})"
        )
    missing = [name for name in run.row.teachers if name not in run.teachers]
    if missing:
        raise ConfigError(
            f"system {run.system.name} needs the teachers {missing}; got {sorted(run.teachers)}"
        )


def max_sequence(run: VerlRun) -> int:
    """Longest prompt, longest completion, and the one position that SGLang keeps back."""
    return run.workflow.max_input_tokens + run.workflow.max_output_tokens + 1


def _data(run: VerlRun) -> dict[str, Any]:
    return {
        "data.train_files": run.folder / TRAIN_FILE,
        "data.val_files": run.folder / DEV_FILE,
        "data.train_batch_size": run.training.questions_per_step,
        "data.max_prompt_length": run.workflow.max_input_tokens,
        "data.max_response_length": run.workflow.max_output_tokens,
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
    }


def _model(scale: Scale, student: str) -> dict[str, Any]:
    return {
        f"{_MODEL}.path": student,
        f"+{_MODEL}.override_config.attn_implementation": scale.verl.attention,
        # Rows lie end to end; with sdpa transformers keeps them apart by their position ids.
        f"{_MODEL}.use_remove_padding": True,
        # Log-probabilities in chunks: without flash attention's kernel verl otherwise takes them
        # token by token, and keeps the logits of a microbatch.
        f"{_MODEL}.use_fused_kernels": True,
        f"{_MODEL}.fused_kernel_options.impl_backend": "torch",
        f"{_MODEL}.enable_gradient_checkpointing": scale.training.gradient_checkpointing,
    }


def _actor(scale: Scale, run: VerlRun) -> dict[str, Any]:
    training = run.training
    return {
        f"{_ACTOR}.strategy": "fsdp2",
        f"{_ACTOR}.optim.lr": training.lr,
        f"{_ACTOR}.optim.weight_decay": 0.0,
        f"{_ACTOR}.optim.clip_grad": training.grad_clip,
        f"{_ACTOR}.grad_clip": training.grad_clip,
        f"{_ACTOR}.ppo_epochs": 1,
        # Only checked by verl: the plug-in cuts every batch into its own minibatches.
        f"{_ACTOR}.ppo_mini_batch_size": training.questions_per_step,
        f"{_ACTOR}.use_dynamic_bsz": True,
        f"{_ACTOR}.ppo_max_token_len_per_gpu": max(
            training.tokens_per_microbatch, max_sequence(run)
        ),
        f"{_ACTOR}.shuffle": True,
        f"{_ACTOR}.loss_agg_mode": "token-mean",
        f"{_ACTOR}.clip_ratio": training.clip_ratio,
        f"{_ACTOR}.clip_ratio_low": training.clip_ratio,
        f"{_ACTOR}.clip_ratio_high": training.clip_ratio,
        f"{_ACTOR}.clip_ratio_c": training.dual_clip,
        f"{_ACTOR}.entropy_coeff": training.entropy_coef,
        f"{_ACTOR}.use_kl_loss": False,
        f"{_ACTOR}.use_torch_compile": False,
        f"{_ACTOR}.fsdp_config.use_torch_compile": False,
        f"{_ACTOR}.fsdp_config.optimizer_offload": scale.verl.offload_optimizer,
        f"{_ACTOR}.checkpoint.save_contents": "[model,optimizer,extra,hf_model]",
        f"{_ACTOR}.checkpoint.load_contents": "[model,optimizer,extra]",
        f"{_REF}.fsdp_config.use_torch_compile": False,
    }


def _rollout(scale: Scale, run: VerlRun) -> dict[str, Any]:
    training, evaluation = run.training, run.evaluation_sampling
    return {
        f"{_ROLLOUT}.n": training.group_size,
        f"{_ROLLOUT}.temperature": training.sampling.temperature,
        f"{_ROLLOUT}.top_p": training.sampling.top_p,
        f"{_ROLLOUT}.tensor_model_parallel_size": scale.verl.rollout_tensor_parallel,
        f"{_ROLLOUT}.max_model_len": max_sequence(run),
        f"{_ROLLOUT}.calculate_log_probs": True,
        f"{_ROLLOUT}.agent.num_workers": scale.verl.agent_workers,
        f"{_ROLLOUT}.val_kwargs.n": 1,
        f"{_ROLLOUT}.val_kwargs.do_sample": True,
        f"{_ROLLOUT}.val_kwargs.temperature": evaluation.temperature,
        f"{_ROLLOUT}.val_kwargs.top_p": evaluation.top_p,
    }


def _algorithm(run: VerlRun) -> dict[str, Any]:
    return {
        # No critic; the estimator itself is never called.
        "algorithm.adv_estimator": "grpo",
        # Starts the reference model; the penalty itself is applied with the advantages.
        "algorithm.use_kl_in_reward": run.reference_teacher is not None,
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.rollout_is_threshold": run.training.importance_cap,
        "algorithm.rollout_correction.bypass_mode": False,
    }


def _trainer(scale: Scale, run: VerlRun, start: StartPoint) -> dict[str, Any]:
    return {
        "trainer.v1.trainer_mode": TRAINER_NAME,
        "trainer.n_gpus_per_node": scale.verl.gpus,
        "trainer.nnodes": 1,
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": run.num_steps,
        "trainer.save_freq": run.training.checkpoint_every,
        "trainer.test_freq": run.training.validate_every,
        "trainer.val_before_train": start.validate_first,
        "trainer.val_only": start.only_validate,
        "trainer.resume_mode": "auto",
        "trainer.default_local_dir": run.folder / CHECKPOINTS,
        "trainer.max_actor_ckpt_to_keep": 2,
        "trainer.project_name": "moopd",
        "trainer.experiment_name": run.system.name,
        "trainer.logger": "[console,file]",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": scale.verl.storage_units,
        # A cluster of its own on this host: never one that happens to run here.
        "+ray_kwargs.ray_init.address": "local",
        "+ray_kwargs.ray_init.include_dashboard": False,
        "hydra.run.dir": run.folder / "hydra",
        "hydra.output_subdir": "null",
    }


def _sglang(scale: Scale, run: VerlRun) -> dict[str, Any]:
    engine = f"+{_ROLLOUT}.engine_kwargs.sglang"
    return {
        f"{_ROLLOUT}.name": "sglang",
        f"{_ROLLOUT}.dtype": "bfloat16",
        f"{_ROLLOUT}.gpu_memory_utilization": scale.verl.gpu_memory_utilization,
        f"{_ROLLOUT}.max_num_seqs": scale.verl.max_running_requests,
        f"{_REF}.fsdp_config.model_dtype": "bfloat16",
        f"{engine}.attention_backend": scale.verl.sglang_attention,
        f"{engine}.sampling_backend": scale.verl.sglang_sampling,
        f"{engine}.grammar_backend": "none",
        f"{engine}.disable_piecewise_cuda_graph": True,
        f"{engine}.cuda_graph_max_bs": scale.verl.max_running_requests,
        # verl keeps its max_model_len to itself.
        f"{engine}.context_length": max_sequence(run),
    }


def _cpu(scale: Scale) -> dict[str, Any]:
    return {
        "trainer.device": "cpu",
        f"{_ROLLOUT}.name": CPU_REPLICA,
        f"{_ROLLOUT}.free_cache_engine": False,
        f"+{_ACTOR}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"+{_REF}.fsdp_config.mixed_precision.param_dtype": "fp32",
        "+ray_kwargs.ray_init.num_gpus": scale.verl.gpus,
        # Ray counts cores for every actor; these share what there is.
        "ray_kwargs.ray_init.num_cpus": 8,
    }


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "True" if value else "False"
    if isinstance(value, Path):
        return str(value)
    return str(value)
