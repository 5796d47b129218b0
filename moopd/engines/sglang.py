"""The SGLang engine: many workflows at once, prefixes shared by its radix cache.

Per-request seeds are honoured only with SGLang's deterministic inference (option `deterministic`,
on by default); without it sampling is faster and a rerun samples other tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from moopd.config import EngineConfig
from moopd.engines.base import EngineError
from moopd.engines.sglang_transport import Body, HttpTransport, InProcessTransport, Transport
from moopd.types import CheckpointRef, Completion, GenerateRequest, ScoreRequest

T = TypeVar("T")
Decode = Callable[[Sequence[int]], str]

_MIN_SHARED_PROMPT = 64
"""Shorter prompts are cheaper to prefill again than to warm."""
_HTTP_OPTIONS = ("timeout_s", "max_retries", "backoff_s", "max_connections", "weights_dir")
_OWN_OPTIONS = ("deterministic", "share_memory")


class SGLangEngine:
    """Samples and scores through a `Transport`; `decode` turns sampled ids into text.

    Without `eos_token_id` nothing ends a completion before its `max_tokens` (benchmarks).
    """

    def __init__(
        self,
        transport: Transport,
        decode: Decode,
        eos_token_id: int | None,
        *,
        shares_memory: bool = True,
    ) -> None:
        self._transport = transport
        self._shares_memory = shares_memory
        self._decode = decode
        self._eos = eos_token_id
        self._version: str | None = None
        self._num_updates = 0
        self._asleep = False

    def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
        return self.run(self._all(requests))

    async def complete(self, request: GenerateRequest) -> tuple[Completion, ...]:
        """One request; await many at once inside `run`."""
        prompt = list(request.prompt_ids)
        if request.num_candidates > 1 and len(prompt) >= _MIN_SHARED_PROMPT:
            # Candidates sent together would each prefill the prompt: it is cached first.
            await self._transport.generate(_body(prompt, request, 0, self._eos, max_tokens=0))
        bodies = [
            _body(prompt, request, number, self._eos) for number in range(request.num_candidates)
        ]
        answers = await asyncio.gather(*(self._transport.generate(body) for body in bodies))
        return tuple(self._completion(answer) for answer in answers)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Drive a coroutine that awaits `complete` to its end."""
        self.wake()
        return self._transport.run(work)

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return self.run(self._score_all(requests))

    def load_weights(self, checkpoint: CheckpointRef) -> None:
        self.wake()
        version = f"{checkpoint.system}-{checkpoint.step}-{checkpoint.sha256[:16]}"
        self._transport.load_folder(Path(checkpoint.path), version)
        if self._transport.reports_versions:
            self._version = version

    def update_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take the trainer's weights without a restart; the prefix cache is flushed."""
        self.wake()
        self._num_updates += 1
        version = f"update-{self._num_updates}"
        self._transport.load_tensors(tensors, version)
        if self._transport.reports_versions:
            self._version = version

    def end_conversations(self) -> None:
        """Nothing to do: the radix cache drops its least recently used prefixes by itself."""

    def sleep(self) -> None:
        """Give the KV cache's memory to the trainer until the next request, where it is shared."""
        if self._shares_memory and not self._asleep:
            self._transport.release()
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._transport.resume()
            self._asleep = False

    def close(self) -> None:
        self._transport.close()

    async def _all(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
        return list(await asyncio.gather(*(self.complete(request) for request in requests)))

    async def _score_all(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return list(await asyncio.gather(*(self._score_one(request) for request in requests)))

    async def _score_one(self, request: ScoreRequest) -> tuple[float, ...]:
        body = {
            "input_ids": [*request.prompt_ids, *request.token_ids],
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": len(request.prompt_ids) - 1,
        }
        meta = (await self._transport.generate(body)).get("meta_info", {})
        entries = meta.get("input_token_logprobs") or []
        wanted = entries[len(entries) - len(request.token_ids) :]
        if [entry[1] for entry in wanted] != list(request.token_ids):
            raise EngineError(
                f"SGLang scored tokens {[entry[1] for entry in wanted][:8]}..., expected "
                f"{list(request.token_ids)[:8]}...; its version is not the pinned one"
            )
        return tuple(float(entry[0]) for entry in wanted)

    def _completion(self, answer: Body) -> Completion:
        meta = answer.get("meta_info") or {}
        finish = _finish(meta)
        self._check_version(meta)
        entries = meta.get("output_token_logprobs") or []
        ids = tuple(int(entry[1]) for entry in entries)
        logprobs = tuple(float(entry[0]) for entry in entries)
        if not ids or not all(math.isfinite(value) for value in logprobs):
            raise EngineError(
                f"SGLang returned {len(ids)} tokens with log-probabilities {logprobs[:4]}..., "
                "expected at least one token and finite values; check the weights it holds"
            )
        return Completion(ids, logprobs, self._decode(ids), finish)

    def _check_version(self, meta: dict[str, Any]) -> None:
        got = meta.get("weight_version")
        if self._version is not None and got is not None and got != self._version:
            raise EngineError(
                f"SGLang samples from weights {got!r}, expected {self._version!r}: it was "
                "restarted or another run uses it; load the weights again and redo the step"
            )


def start_sglang(
    config: EngineConfig, model_path: str, decode: Decode, eos_token_id: int | None
) -> SGLangEngine:
    """The engine that `engine.url` or, without it, `engine.options` describe.

    Options: `deterministic`, `share_memory` (its KV memory can be released during updates), those
    of `HttpTransport`, and any argument of SGLang's ServerArgs.
    """
    options = dict(config.options)
    if config.url is not None:
        unknown = sorted(set(options) - set(_HTTP_OPTIONS) - set(_OWN_OPTIONS))
        if unknown:
            raise ValueError(
                f"engine.options {unknown} belong to a server's own command line; with "
                f"engine.url only {list(_HTTP_OPTIONS)} apply"
            )
        http: dict[str, Any] = {k: v for k, v in options.items() if k in _HTTP_OPTIONS}
        transport: Transport = HttpTransport(config.url, **http)
    else:
        transport = InProcessTransport.start(model_path, server_options(options))
    shares_memory = bool(options.get("share_memory", False))
    return SGLangEngine(transport, decode, eos_token_id, shares_memory=shares_memory)


_SHARED: dict[str, SGLangEngine] = {}


def shared_sglang(
    config: EngineConfig, model_path: str, decode: Decode, eos_token_id: int
) -> SGLangEngine:
    """The engine of this process, started once: later policies are loaded into it."""
    key = config.digest()
    if key not in _SHARED:
        _SHARED[key] = start_sglang(config, model_path, decode, eos_token_id)
    return _SHARED[key]


def server_options(options: dict[str, Any]) -> dict[str, Any]:
    """ServerArgs for `options`, with the defaults that need no compiler at run time."""
    rest = {key: value for key, value in options.items() if key not in _OWN_OPTIONS}
    defaults = {
        "attention_backend": "triton",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "enable_deterministic_inference": bool(options.get("deterministic", True)),
        "enable_memory_saver": bool(options.get("share_memory", False)),
    }
    return defaults | rest


def _body(
    prompt: list[int],
    request: GenerateRequest,
    candidate: int,
    eos: int | None,
    max_tokens: int | None = None,
) -> Body:
    return {
        "input_ids": prompt,
        "sampling_params": {
            "max_new_tokens": request.max_tokens if max_tokens is None else max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            **({"ignore_eos": True} if eos is None else {"stop_token_ids": [eos]}),
            "sampling_seed": candidate_seed(request.seed, candidate),
        },
        "return_logprob": True,
    }


def candidate_seed(seed: int, candidate: int) -> int:
    """63 bits; candidate 0 keeps the request's own seed."""
    return (seed ^ (candidate * 0x9E3779B97F4A7C15)) & ((1 << 63) - 1)


def _finish(meta: dict[str, Any]) -> Literal["stop", "length"]:
    reason = meta.get("finish_reason") or {}
    kind = reason.get("type") if isinstance(reason, dict) else None
    if kind == "stop":
        return "stop"
    if kind == "length":
        return "length"
    raise EngineError(
        f"SGLang ended a request with {reason!r}, expected stop or length; "
        "it was aborted: redo the step"
    )
