"""What a run shows of its long work: bars to a person at a terminal, plain lines to a log."""

from __future__ import annotations

import re
import sys
import threading
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

_COUNT = re.compile(r"(\d+) of (\d+)")


class Progress(Protocol):
    """Thread-safe; stages run side by side."""

    def total(self, stages: int) -> None: ...

    def started(self, stage: str) -> None: ...

    def line(self, stage: str, text: str) -> None: ...

    def ended(self, stage: str, how: str) -> None: ...

    def close(self) -> None: ...


class PlainProgress:
    """One line an event on stderr."""

    def total(self, stages: int) -> None:
        pass

    def started(self, stage: str) -> None:
        self._say(f"{stage}: started")

    def line(self, stage: str, text: str) -> None:
        self._say(text)

    def ended(self, stage: str, how: str) -> None:
        if how != "cached":
            self._say(f"{stage}: {how}")

    def close(self) -> None:
        pass

    def _say(self, text: str) -> None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


class BarProgress:
    """A bar over all stages, and one line for each stage under way."""

    def __init__(self, console: Console) -> None:
        self._bars = Bars(
            TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[said]}"),
            TimeElapsedColumn(), console=console, transient=True,
        )  # fmt: skip
        self._lock = threading.Lock()
        self._rows: dict[str, TaskID] = {}
        self._all: TaskID | None = None

    def total(self, stages: int) -> None:
        self._all = self._bars.add_task("all stages", total=stages, said="")
        self._bars.start()

    def started(self, stage: str) -> None:
        with self._lock:
            self._rows[stage] = self._bars.add_task(stage, total=None, said="")

    def line(self, stage: str, text: str) -> None:
        row = self._rows.get(stage)
        if row is None:
            return
        said = text.removeprefix(f"{stage}: ")
        count = _COUNT.match(said)
        if count:
            self._bars.update(row, completed=int(count[1]), total=int(count[2]))
        self._bars.update(row, said=said)

    def ended(self, stage: str, how: str) -> None:
        with self._lock:
            row = self._rows.pop(stage, None)
        if row is not None:
            self._bars.remove_task(row)
        if self._all is not None:
            self._bars.advance(self._all)
        if how != "cached":
            self._bars.console.print(f"{stage}: {how}", markup=False, highlight=False)

    def close(self) -> None:
        self._bars.stop()


def progress_for_stderr() -> Progress:
    console = Console(stderr=True)
    return BarProgress(console) if console.is_terminal else PlainProgress()
