"""What a policy engine must do. Tokens in, tokens out: text is derived and never re-encoded."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from moopd.types import CheckpointRef, Completion, GenerateRequest, ScoreRequest

T = TypeVar("T")


class EngineError(RuntimeError):
    """The engine is gone or answered nonsense; the step is to be redone, nothing was recorded."""


class Engine(Protocol):
    """A policy that samples and scores."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
        """`num_candidates` completions per request, in order.

        A request's tokens depend on its prompt and seed alone, never on its neighbours.
        """
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        """Log-probability (temperature 1) of every token of `token_ids`, one tuple per request."""
        ...

    def load_weights(self, checkpoint: CheckpointRef) -> None:
        """Swap the policy in place. Raises ValueError when the vocabulary differs."""
        ...

    def end_conversations(self) -> None:
        """Forget every kept KV cache; called when a batch of workflows is over."""
        ...


@runtime_checkable
class WeightReceiver(Protocol):
    """An engine with weights of its own, which the trainer sends after every update."""

    def update_weights(self, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take named tensors (transformers' names) without a restart."""
        ...

    def sleep(self) -> None:
        """Give device memory back until the next request."""
        ...


@runtime_checkable
class ConcurrentEngine(Engine, Protocol):
    """An engine that serves single requests as they come; no batch has to wait for its slowest."""

    async def complete(self, request: GenerateRequest) -> tuple[Completion, ...]: ...

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Drive a coroutine that awaits `complete` to its end."""
        ...
