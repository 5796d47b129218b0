"""What verl logs, one file per attempt, as the training loop's own history."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

Log = Callable[[int, dict[str, float]], None]
_PATTERN = "metrics_*.jsonl"


def next_metrics_file(work: Path) -> Path:
    """verl truncates the file it logs to, so every attempt gets its own."""
    return work / f"metrics_{len(list(work.glob(_PATTERN))) + 1:03d}.jsonl"


class MetricsTail:
    """Follows a metrics file while verl writes it and hands on every complete line."""

    def __init__(self, path: Path, log: Log) -> None:
        self._path = path
        self._log = log
        self._offset = 0

    def poll(self) -> None:
        if not self._path.is_file():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                step, metrics = _parsed(line)
                self._log(step, metrics)


def history(work: Path) -> tuple[dict[str, float], ...]:
    """Metrics of every step, each with its `step`; a step done again counts as done last."""
    steps: dict[int, dict[str, float]] = {}
    for path in sorted(work.glob(_PATTERN)):
        for line in path.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                step, metrics = _parsed(line)
                steps.setdefault(step, {"step": step}).update(metrics)
    return tuple(steps[step] for step in sorted(steps))


def _parsed(line: bytes) -> tuple[int, dict[str, float]]:
    entry: dict[str, Any] = json.loads(line)
    numbers = {
        name: float(value)
        for name, value in entry["data"].items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
    return int(entry["step"]), numbers
