"""The policy in this process: one batched call serves all live workflows.

Ragged prefill of what a conversation has not seen yet (equal prompts once), one prompt forked into
its candidates, lock-step decoding with compaction of finished rows, KV cache kept between turns.
A request's tokens depend on its prompt and seed alone; log-probabilities are those of the policy
at temperature 1, which is what training samples with.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, prod
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from moopd.engines.conversations import Conversations
from moopd.engines.kv_cache import KVCache, Workspace
from moopd.engines.models import check_same_vocabulary, load_policy
from moopd.engines.rows import merge_prefixes
from moopd.engines.sampling import choose, uniforms
from moopd.types import CheckpointRef, Completion, GenerateRequest, ScoreRequest

_T = TypeVar("_T")
_PREFILL_TOKENS = 16_384
_DECODE_ROWS = 768
_LENGTH_SPREAD = 1.3
_AT_LEAST_ONE = "render at least one token"
_CACHE_BYTES = 1 << 29
_CACHE_SHARE_GPU = 8
"""On a GPU the budget is this part (one in ...) of the memory that is free at the start."""


@dataclass
class _Prompt:
    """One distinct prompt of a call: what is kept of it, and the requests that share it."""

    ids: tuple[int, ...]
    past: Tensor | None
    requests: list[int] = field(default_factory=list)
    planes: Tensor | None = None
    logits: Tensor | None = None

    @property
    def num_new(self) -> int:
        return len(self.ids) - (0 if self.past is None else self.past.shape[2])


@dataclass
class _Row:
    """One candidate while it is decoded."""

    request: int
    candidate: int
    prompt: _Prompt
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    planes: Tensor | None = None


class LocalEngine:
    """An `Engine` on any transformers causal LM; shares the module with a trainer if given one.

    `cache_bytes` bounds what is kept between turns, and likewise what decodes at once (which takes
    up to three times as much while it is copied); it decides speed, never a result.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        score_tokens: int = 16_384,
        cache_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._device = next(model.parameters()).device
        self._eos = int(tokenizer.eos_token_id)
        self._pad = int(tokenizer.pad_token_id)
        self._score_tokens = score_tokens
        self._cache_bytes = _budget(self._device) if cache_bytes is None else cache_bytes
        self._conversations = Conversations(self._cache_bytes)
        self._workspace = Workspace(model.dtype, self._device)
        names = inspect.signature(model.model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
        rows = [
            row
            for prompts in self._groups(self._prompts(requests), requests)
            for row in self._run(prompts, requests)
        ]
        grouped: dict[int, list[_Row]] = {}
        for row in rows:
            grouped.setdefault(row.request, []).append(row)
        return [
            tuple(self._completion(row) for row in sorted(grouped[n], key=lambda r: r.candidate))
            for n in range(len(requests))
        ]

    def _run(self, prompts: Sequence[_Prompt], requests: Sequence[GenerateRequest]) -> list[_Row]:
        for block in _blocks(prompts, lambda p: p.num_new, _PREFILL_TOKENS):
            self._prefill(block)
        rows = [
            _Row(number, candidate, prompt)
            for prompt in prompts
            for number in prompt.requests
            for candidate in range(requests[number].num_candidates)
        ]
        for decoding in _blocks(rows, lambda r: len(r.prompt.ids), None, _DECODE_ROWS):
            self._decode(decoding, requests)
        self._keep(rows, requests)
        for prompt in prompts:
            prompt.past = prompt.planes = prompt.logits = None
        return rows

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        """Sequences that begin alike are computed once; logits at the wanted places only."""
        for number, request in enumerate(requests):
            if not request.prompt_ids:
                raise ValueError(f"score request {number} has an empty prompt; {_AT_LEAST_ONE}")
        sequences = [(*request.prompt_ids, *request.token_ids) for request in requests]
        rows, row_of = merge_prefixes(sequences)
        wanted: dict[int, list[int]] = {}
        for number, row in enumerate(row_of):
            wanted.setdefault(row, []).append(number)
        found: list[tuple[float, ...]] = [()] * len(requests)
        for block in _blocks(list(wanted), lambda n: len(rows[n]), self._score_tokens):
            hidden = self._hidden([rows[n] for n in block])
            for place, row in enumerate(block):
                for number in wanted[row]:
                    start = len(requests[number].prompt_ids) - 1
                    tokens = requests[number].token_ids
                    logits = self._logits(hidden[place, start : start + len(tokens)])
                    found[number] = tuple(_logprobs(logits, tokens).tolist())
        return found

    def load_weights(self, checkpoint: CheckpointRef) -> None:
        model, _ = load_policy(checkpoint.path, _dtype_name(self.model), str(self._device))
        check_same_vocabulary(self.model, model)
        self.model.load_state_dict(model.state_dict())
        self.end_conversations()

    def end_conversations(self) -> None:
        self._conversations.clear()
        self._workspace.rest()

    def _prompts(self, requests: Sequence[GenerateRequest]) -> list[_Prompt]:
        """Distinct prompts; a kept conversation gives its longest usable prefix."""
        self._conversations.begin_call()
        distinct: dict[tuple[int, ...], _Prompt] = {}
        for number, request in enumerate(requests):
            if not request.prompt_ids:
                raise ValueError(f"request {number} has an empty prompt; {_AT_LEAST_ONE}")
            prompt = distinct.get(request.prompt_ids)
            if prompt is None:
                past = self._conversations.past(request.conversation_key, request.prompt_ids)
                prompt = _Prompt(request.prompt_ids, past)
                distinct[request.prompt_ids] = prompt
            prompt.requests.append(number)
        return list(distinct.values())

    def _groups(
        self, prompts: Sequence[_Prompt], requests: Sequence[GenerateRequest]
    ) -> Iterator[list[_Prompt]]:
        """Prompts of like length whose candidates, padded, fit the cache budget together."""
        group: list[_Prompt] = []
        num_rows = 0
        for prompt in sorted(prompts, key=lambda p: len(p.ids)):
            asked = [requests[number] for number in prompt.requests]
            width = len(prompt.ids) + max(request.max_tokens for request in asked)
            more = sum(request.num_candidates for request in asked)
            if group and (num_rows + more) * width * self._token_bytes > self._cache_bytes:
                yield group
                group, num_rows = [], 0
            group.append(prompt)
            num_rows += more
        if group:
            yield group

    def _prefill(self, prompts: Sequence[_Prompt]) -> None:
        """Run the new part of each prompt behind its kept part; keeps planes and last logits."""
        news = [prompt.ids[len(prompt.ids) - prompt.num_new :] for prompt in prompts]
        width = max(len(new) for new in news)
        ids = torch.full((len(news), width), self._pad)
        for number, new in enumerate(news):
            ids[number, : len(new)] = torch.tensor(new)
        lengths = torch.tensor([len(new) for new in news], device=self._device)
        cache = self._cache([p.past for p in prompts], width)
        past = cache.valid.sum(1)
        offset = torch.arange(width, device=self._device)
        causal = (offset.unsqueeze(0) <= offset.unsqueeze(1)).expand(len(news), width, width)
        before = cache.valid[:, : cache.length].unsqueeze(1).expand(-1, width, -1)
        mask = torch.cat([before, causal], dim=2).unsqueeze(1)
        hidden = self._forward(ids, mask, past.unsqueeze(1) + offset, cache)
        cache.valid[:, cache.length : cache.length + width] = offset < lengths.unsqueeze(1)
        cache.length += width
        last = hidden[torch.arange(len(news), device=self._device), lengths - 1]
        logits = self._logits(last)
        for number, prompt in enumerate(prompts):
            prompt.planes = cache.row(number)
            prompt.logits = logits[number]

    def _decode(self, rows: Sequence[_Row], requests: Sequence[GenerateRequest]) -> None:
        limit = max(requests[row.request].max_tokens for row in rows)
        cache = KVCache.of([_given(row.prompt.planes) for row in rows], limit, self._workspace)
        logits = torch.stack([_given(row.prompt.logits) for row in rows])
        live = list(rows)
        position = 0
        while live:
            tokens = self._sample(live, logits, requests, position)
            position += 1
            going = [
                n
                for n, (row, token) in enumerate(zip(live, tokens, strict=True))
                if token != self._eos and position < requests[row.request].max_tokens
            ]
            self._retire(live, going, cache, requests)
            if not going:
                return
            order = cache.compact(going) if len(going) < len(live) else going
            live = [live[n] for n in order]
            logits = self._step([tokens[n] for n in order], cache)

    def _sample(
        self,
        live: Sequence[_Row],
        logits: Tensor,
        requests: Sequence[GenerateRequest],
        position: int,
    ) -> list[int]:
        asked = [requests[row.request] for row in live]
        uniform = uniforms(
            np.array([request.seed for request in asked], dtype=np.uint64),
            np.array([row.candidate for row in live], dtype=np.uint64),
            position,
        )
        device = self._device
        chosen = choose(
            logits,
            torch.tensor([request.temperature for request in asked], device=device),
            torch.tensor([request.top_p for request in asked], device=device),
            torch.from_numpy(uniform).to(device),
        )
        found = torch.log_softmax(logits, -1).gather(1, chosen.unsqueeze(1)).squeeze(1)
        tokens: list[int] = chosen.tolist()
        logprobs: list[float] = found.tolist()
        if not all(map(isfinite, logprobs)):
            self._conversations.clear()
            self._workspace.clear()
            raise FloatingPointError(
                f"the policy gives log-probability {min(logprobs)} at token {position} of a "
                "completion, expected finite ones; its weights have diverged: go back to a "
                "checkpoint, or lower the learning rate"
            )
        for row, token, logprob in zip(live, tokens, logprobs, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        return tokens

    def _retire(
        self,
        live: Sequence[_Row],
        going: Sequence[int],
        cache: KVCache,
        requests: Sequence[GenerateRequest],
    ) -> None:
        """Put aside the keys and values of finished rows whose conversation may go on."""
        for number in set(range(len(live))) - set(going):
            row = live[number]
            request = requests[row.request]
            if request.conversation_key is not None and request.num_candidates == 1:
                row.planes = cache.row(number)

    def _step(self, tokens: Sequence[int], cache: KVCache) -> Tensor:
        positions = cache.valid.sum(1, keepdim=True)
        cache.valid[:, cache.length] = True
        mask = cache.valid[:, None, None, : cache.length + 1]
        hidden = self._forward(torch.tensor(tokens).unsqueeze(1), mask, positions, cache)
        cache.length += 1
        return self._logits(hidden[:, 0])

    def _keep(self, rows: Sequence[_Row], requests: Sequence[GenerateRequest]) -> None:
        """The last sampled token was never fed to the model: ids without it."""
        for row in rows:
            key = requests[row.request].conversation_key
            if key is not None and row.planes is not None:
                ids = (*row.prompt.ids, *row.tokens[:-1])
                self._conversations.keep(key, ids, row.planes)
                row.planes = None

    @property
    def _plane_shape(self) -> tuple[int, int, int]:
        """(2 * layers, heads, dim): keys and values of one token."""
        config = self.model.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2 * config.num_hidden_layers, config.num_key_value_heads, dim

    @property
    def _token_bytes(self) -> int:
        return prod(self._plane_shape) * int(self.model.dtype.itemsize)

    def _cache(self, kept: Sequence[Tensor | None], extra: int) -> KVCache:
        planes, heads, dim = self._plane_shape
        empty = torch.zeros((planes, heads, 0, dim), dtype=self.model.dtype, device=self._device)
        rows = [empty if past is None else past for past in kept]
        return KVCache.of(rows, extra, self._workspace)

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
        hidden: Tensor = self.model.model(
            input_ids=ids.to(self._device),
            attention_mask=mask,
            position_ids=positions,
            use_cache=True,
            **{self._cache_argument: cache},
        ).last_hidden_state
        return hidden

    def _hidden(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        width = max(len(row) for row in rows)
        ids = torch.full((len(rows), width), self._pad)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
        hidden: Tensor = self.model.model(
            input_ids=ids.to(self._device), use_cache=False
        ).last_hidden_state
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(hidden)
        return logits.float()

    def _completion(self, row: _Row) -> Completion:
        ended = row.tokens[-1] == self._eos
        text = self.tokenizer.decode(row.tokens, skip_special_tokens=True).strip()
        return Completion(
            tuple(row.tokens), tuple(row.logprobs), text, "stop" if ended else "length"
        )


def _blocks(
    items: Sequence[_T], length: Any, max_tokens: int | None, max_rows: int = 4096
) -> Iterator[list[_T]]:
    """Items in order of length, cut where padding would cost too much."""
    block: list[_T] = []
    for item in sorted(items, key=length):
        size = length(item)
        too_big = max_tokens is not None and size * (len(block) + 1) > max_tokens
        uneven = bool(block) and size > _LENGTH_SPREAD * length(block[0]) + 8
        if block and (too_big or len(block) >= max_rows or (max_tokens is not None and uneven)):
            yield block
            block = []
        block.append(item)
    if block:
        yield block


def _logprobs(logits: Tensor, tokens: Sequence[int]) -> Tensor:
    target = torch.tensor(tokens, device=logits.device).unsqueeze(1)
    return torch.log_softmax(logits, -1).gather(1, target).squeeze(1)


def _budget(device: torch.device) -> int:
    if device.type != "cuda":
        return _CACHE_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) // _CACHE_SHARE_GPU


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("prompt was not prefilled")
    return tensor


def _dtype_name(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")
