"""What the loop needs of a trainer: it sees samples, never a role, a system or a reward."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from moopd.engines.base import Engine
from moopd.trainers.checkpoints import TrainingState
from moopd.types import ScoreRequest, TrainingSample


class Trainer(Protocol):
    """Owns the policy's weights and its optimizer."""

    def update(self, samples: Sequence[TrainingSample], seed: int) -> dict[str, float]:
        """The PPO minibatch updates of one step; metrics of the update."""
        ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        """Log-probabilities under the current weights (old log-probabilities before an update)."""
        ...

    def publish(self, engine: Engine) -> None:
        """Give the current weights to the engine that samples."""
        ...

    def save(self, folder: Path, state: TrainingState) -> None: ...

    def restore(self, folder: Path) -> TrainingState: ...
