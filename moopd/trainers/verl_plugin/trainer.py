"""verl's synchronous trainer with our credit: five updates a step, teachers as reference models.

Overridden are five private methods and two hooks of verl 0.9.1; tests/trainers/verl_plugin asserts
their signatures.
"""

from __future__ import annotations

import math
import os
from statistics import fmean
from typing import Any

import ray
import torch
import transfer_queue as tq
import verl
from omegaconf import open_dict
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch
from verl.trainer.ppo.utils import Role as VerlRole
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.metric import reduce_metrics
from verl.workers.utils.padding import response_from_nested

from moopd.trainers.verl_plugin.credit import (
    Credited,
    ScoredRow,
    check_development,
    credit_batch,
)
from moopd.trainers.verl_plugin.rows import (
    owner_of,
    workflow_key,
    write_samples,
    write_workflows,
)
from moopd.trainers.verl_plugin.spec import TRAINER_NAME, VERL_VERSION, load_run
from moopd.trainers.verl_plugin.validation import record_validation
from moopd.trainers.verl_plugin.workers import TeacherWorker
from moopd.types import TrainingSample
from moopd.workflows.rollout import derive_seed

_POLICY_ROLES = (VerlRole.ActorRolloutRef, VerlRole.ActorRollout, VerlRole.Actor)
_FIELDS = (
    "response_mask",
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "second_log_prob",
    "extra_fields",
)


@register_trainer(TRAINER_NAME)
class MoopdTrainer(PPOTrainerSync):  # type: ignore[misc]
    """The loop, the queue and the workers are verl's; credit and minibatches are ours."""

    def __init__(self, config: Any) -> None:
        if verl.__version__ != VERL_VERSION:
            raise RuntimeError(
                f"verl is {verl.__version__}, expected {VERL_VERSION}: the plug-in overrides "
                "private methods of exactly that version; rebuild its environment"
            )
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"
        self.moopd = load_run(str(config.actor_rollout_ref.moopd.run_file))
        self.moopd.leave_proof(
            "trainer", {"pid": os.getpid(), "module": __file__, "verl": verl.__version__}
        )
        super().__init__(config)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in _POLICY_ROLES:
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(TeacherWorker)

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        """Every training process gets the same number of rows in each of the minibatches."""
        return dp_size * self.moopd.training.num_minibatches

    def _compute_ref_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_ref_log_prob(batch, metrics)
        if self.moopd.second_teacher is None:
            return batch
        self.ref_policy_wg.compute_second_log_prob(batch)
        data = _get(batch, ("log_probs", "response_mask"))
        second = response_from_nested(data["log_probs"], data["response_mask"])
        _put(batch, {"second_log_prob": second})
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        data = _get(batch, _FIELDS)
        metas = [fields["moopd"] for fields in list(data["extra_fields"])]
        real = [not tag.get("is_padding", False) for tag in batch.tags]
        credited, numbers = self._credit(data, metas, real)
        metrics.update(credited.metrics)
        metrics.update(_behaviour([metas[n] for n in numbers]))
        if self.moopd.keep_rows:
            self._keep_rows(batch, data, metas, credited, numbers)
        lengths = data["response_mask"].offsets().diff().tolist()
        advantages = [torch.zeros(length) for length in lengths]
        mask = [torch.zeros(length, dtype=torch.int64) for length in lengths]
        for number, advantage in zip(numbers, credited.advantages, strict=True):
            if advantage:
                advantages[number] = torch.tensor(advantage, dtype=torch.float32)
                mask[number] = torch.ones(lengths[number], dtype=torch.int64)
        corrected, correction = self._correct(data, mask)
        metrics.update(correction)
        # verl counts the loss's tokens by `loss_mask` and sums over `response_mask`.
        trained = corrected.pop("response_mask")
        nested = _nested(advantages)
        fields = {"advantages": nested, "returns": nested, "response_mask": trained}
        return _put(batch, {**fields, "loss_mask": trained, **corrected})

    def _credit(
        self, data: Any, metas: list[dict[str, Any]], real: list[bool]
    ) -> tuple[Credited, list[int]]:
        """Credit of the real rows, and their positions in the batch."""
        numbers = [n for n, is_real in enumerate(real) if is_real]
        masks = data["response_mask"].unbind()
        columns = {
            name: [row.tolist() for row in data[name].unbind()]
            for name in ("rollout_log_probs", "old_log_probs", "ref_log_prob", "second_log_prob")
            if name in data
        }

        def values(name: str, number: int) -> tuple[float, ...] | None:
            if name not in columns:
                return None
            return tuple(columns[name][number]) if bool(masks[number].any()) else ()

        rows = [
            ScoredRow(
                meta=metas[n],
                old=values("old_log_probs", n) or (),
                rollout=values("rollout_log_probs", n) or (),
                reference=values("ref_log_prob", n),
                second=values("second_log_prob", n),
            )
            for n in numbers
        ]
        return credit_batch(rows, self.moopd), numbers

    def _keep_rows(
        self, batch: Any, data: Any, metas: list[dict[str, Any]], credited: Credited, numbers: Any
    ) -> None:
        tokens = _get(batch, ("prompts", "responses"))
        prompts, responses = tokens["prompts"].unbind(), tokens["responses"].unbind()
        old = data["old_log_probs"].unbind()
        samples = [
            TrainingSample(
                owner=owner_of(metas[n]),
                prompt_ids=tuple(prompts[n].tolist()),
                token_ids=tuple(responses[n].tolist()),
                old_logprobs=tuple(old[n].tolist()),
                advantages=advantage,
            )
            for n, advantage in zip(numbers, credited.advantages, strict=True)
            if advantage
        ]
        write_samples(self.moopd.folder, self.global_steps, samples)
        write_workflows(self.moopd.folder, self.global_steps, [metas[n] for n in numbers])

    def _correct(
        self, data: Any, mask: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Truncated importance weights where the rollout engine's numerics differ."""
        batch = TensorDict(
            {
                "old_log_probs": data["old_log_probs"].to_padded_tensor(0.0),
                "rollout_log_probs": data["rollout_log_probs"].to_padded_tensor(0.0),
                "response_mask": _nested(mask).to_padded_tensor(0),
            },
            batch_size=len(mask),
        )
        config = self.config.algorithm.rollout_correction
        found, metrics = compute_rollout_correction_and_add_to_batch(DataProto(batch=batch), config)
        names = ("response_mask", "rollout_is_weights")
        corrected = {
            name: _nested([row[: len(m)] for row, m in zip(found.batch[name], mask, strict=True)])
            for name in names
            if name in found.batch
        }
        return corrected, metrics

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        num_updates = self.moopd.training.num_minibatches
        actor = self.config.actor_rollout_ref.actor
        minibatch = len(batch) // num_updates
        batch.extra_info.update(
            {
                "calculate_entropy": True,
                "distillation_use_topk": False,
                "distillation_only": False,
                "global_batch_size": minibatch,
                "mini_batch_size": minibatch,
                "epochs": actor.ppo_epochs,
                "seed": derive_seed(self.moopd.seed, self.global_steps) & 0x7FFFFFFF,
                "dataloader_kwargs": {"shuffle": actor.shuffle},
                "temperature": self.config.actor_rollout_ref.rollout.temperature,
            }
        )
        found = self.actor_rollout_wg.update_actor(batch)["metrics"]
        norms = [float(norm) for norm in found["grad_norm"]]
        if len(norms) != num_updates:
            raise RuntimeError(f"verl made {len(norms)} updates, expected {num_updates} a step")
        if not all(math.isfinite(norm) for norm in norms):
            raise FloatingPointError(
                f"gradient norms of step {self.global_steps} are {norms}, expected finite numbers; "
                "the last checkpoint is intact, lower training.lr"
            )
        reduced = reduce_metrics({name.removeprefix("actor/"): v for name, v in found.items()})
        metrics.update({f"actor/{name}": value for name, value in reduced.items()})
        metrics["update/grad_norm"] = fmean(norms)
        metrics["update/num_updates"] = len(norms)
        metrics["update/minibatch_rows"] = minibatch
        return batch

    def _validate(self) -> dict[str, float]:
        metrics: dict[str, float] = super()._validate()
        record_validation(self.moopd.folder, self.global_steps, metrics)
        return metrics

    def _val_metrics_update(
        self,
        data_sources: Any,
        sample_uids: Any,
        reward_extra_infos_dict: dict[str, list[Any]],
        sample_turns: Any,
        expected_acc_counts: Any = None,
    ) -> dict[str, float]:
        """Means over development workflows, named as the torch trainer names them."""
        check_development(reward_extra_infos_dict.pop("error"))
        return {
            f"dev/{name}": fmean(float(value) for value in values)
            for name, values in reward_extra_infos_dict.items()
        }


def _behaviour(metas: list[dict[str, Any]]) -> dict[str, float]:
    measures = list({workflow_key(meta): meta["measures"] for meta in metas}.values())
    return {f"train/{name}": fmean(m[name] for m in measures) for name in measures[0]}


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def _get(batch: Any, fields: tuple[str, ...]) -> Any:
    return tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields)
    )


def _put(batch: Any, fields: dict[str, torch.Tensor]) -> Any:
    return tq.kv_batch_put(
        keys=batch.keys,
        partition_id=batch.partition_id,
        fields=TensorDict(fields, batch_size=len(batch)),
    )
