"""Training engine and rollout replica on the CPU, so that verl's unmodified trainer can be tested.

The replica samples with the project's own engine: several requests that arrive together run as one
batch, and a request's tokens depend on its prompt and seed alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from typing import Any

import ray
import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp_engine
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine.base import EngineRegistry
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from moopd.engines.local import LocalEngine
from moopd.types import Completion, GenerateRequest

REPLICA_NAME = "transformers_cpu"
_GATHER_S = 0.02
"""How long the replica waits for more requests of the same exchange."""


def prepare_worker() -> None:
    """One thread, and a gloo group: the device string that verl would build names gloo twice."""
    torch.set_num_threads(1)
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo",
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
        )


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device=["cpu"])
class CpuEngine(fsdp_engine.FSDPEngineWithLMHead):  # type: ignore[misc]
    """verl's FSDP engine without pinned host memory, which needs an accelerator."""

    def _build_fsdp_module(self, module: Any) -> Any:
        policy = fsdp_engine.CPUOffloadPolicy
        fsdp_engine.CPUOffloadPolicy = lambda **_: None
        try:
            return super()._build_fsdp_module(module)
        finally:
            fsdp_engine.CPUOffloadPolicy = policy


class _Server:
    """A rollout server: verl's calls in, batched sampling on one model."""

    def __init__(self, config: Any, model_config: Any) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        model = omega_conf_to_dataclass(model_config)
        self._config = config
        self._model = AutoModelForCausalLM.from_pretrained(model.local_path, dtype=torch.float32)
        self._engine = LocalEngine(self._model.eval(), model.tokenizer)
        self._version = 0
        self._waiting: list[tuple[GenerateRequest, asyncio.Future[Completion]]] = []

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        **_: Any,
    ) -> TokenOutput:
        request = GenerateRequest(
            prompt_ids=tuple(prompt_ids),
            num_candidates=1,
            max_tokens=int(sampling_params["max_tokens"]),
            temperature=float(sampling_params["temperature"]),
            top_p=float(sampling_params["top_p"]),
            seed=int(sampling_params["seed"]),
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        await asyncio.sleep(_GATHER_S)
        self._run_waiting()
        completion = await future
        return TokenOutput(
            token_ids=list(completion.token_ids),
            log_probs=list(completion.logprobs),
            stop_reason="completed",
            extra_fields={"global_steps": self._version},
        )

    def _run_waiting(self) -> None:
        batch, self._waiting = self._waiting, []
        if not batch:
            return
        try:
            found = self._engine.generate([request for request, _ in batch])
            self._engine.end_conversations()
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for (_, future), (completion,) in zip(batch, found, strict=True):
            future.set_result(completion)

    async def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = {name for name in missing if name.startswith("lm_head")}
        if unexpected or set(missing) - tied:
            raise ValueError(f"weight sync: missing {missing}, unexpected {unexpected}")
        self._model.tie_weights()
        self._version = version

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...

    async def abort_all_requests(self, reject_request: bool = False) -> None: ...

    async def resume_generation(self) -> None: ...

    async def start_profile(self, **_: Any) -> None: ...

    async def stop_profile(self) -> None: ...


def _server_name(rank: int) -> str:
    return f"moopd_cpu_server_{rank}"


class TransformersReplica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        rank = self.replica_rank
        options = {"name": _server_name(rank), "max_concurrency": 256, "num_cpus": 0}
        server = ray.remote(_Server).options(**options).remote(self.config, self.model_config)
        self.servers = [server]
        self._server_handle = server
        self._server_address = f"local://{rank}"


class CpuServerAdapter(BaseRollout):  # type: ignore[misc]
    """Hands the training engine's weights to the replica of the same rank."""

    sleep_level = 2

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        copied = {name: tensor.detach().clone().cpu() for name, tensor in weights}
        server = ray.get_actor(_server_name(int(os.environ["RANK"])))
        await server.load.remote(copied, global_steps or 0)


RolloutReplicaRegistry.register(REPLICA_NAME, lambda: TransformersReplica)
rollout_base._ROLLOUT_REGISTRY[(REPLICA_NAME, "async")] = f"{__name__}.{CpuServerAdapter.__name__}"
