"""What a policy engine must do. Tokens in, tokens out: text is derived and never re-encoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moopd.types import CheckpointRef, Completion, GenerateRequest, ScoreRequest


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
