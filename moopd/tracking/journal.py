"""The journal: one JSON line per event, the one place where state lives.

Status, plan timings and MLflow are derived from it. Each line is appended in one write; a line that
is torn (power loss, full disk) or no event is dropped on reading. A run is alive while its process
holds the run's lock, which the kernel frees however the process ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

Event = dict[str, Any]
FINAL = ("run_finished", "run_lost")


class Journal:
    """Appends events of one run. Safe for several processes and threads."""

    def __init__(self, folder: Path, run: str) -> None:
        self.run = run
        self.path = folder / f"{run}.jsonl"

    def write(self, event: str, **values: Any) -> None:
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}) + "\n"
        with self.path.open("ab") as stream:
            # On a torn line's own line this event would be lost with it.
            start = b"" if _ends_whole(self.path) else b"\n"
            stream.write(start + line.encode())
            stream.flush()
            if event != "metrics":
                os.fsync(stream.fileno())


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 1))
        return stream.read() in (b"", b"\n")


def new_run_id() -> str:
    """Sortable and unique on one machine."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid():05d}{time.time_ns() % 1000:03d}"


def hold(folder: Path, run: str) -> IO[str]:
    """Take the run's lock; keep the stream open as long as the run is alive."""
    stream = (folder / f"{run}.lock").open("w")
    fcntl.flock(stream, fcntl.LOCK_EX)
    stream.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    stream.flush()
    return stream


def read(path: Path) -> Iterator[Event]:
    """Events in order; a torn line is skipped."""
    with path.open("rb") as stream:
        yield from _events(stream)


def read_from(path: Path, offset: int) -> tuple[list[Event], int]:
    """Events after a byte offset, and the offset after the last whole line."""
    with path.open("rb") as stream:
        stream.seek(offset)
        data = stream.read()
    whole = data[: data.rfind(b"\n") + 1]
    return list(_events(whole.splitlines())), offset + len(whole)


def first(path: Path) -> Event:
    """The event that a run began with; empty when there is none yet."""
    return next(read(path), {})


def has_ended(path: Path) -> bool:
    """Whether the run said its last word; looks at the end of the file first."""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4096))
        if any(event["event"] in FINAL for event in _events(stream)):
            return True
    return any(event["event"] in FINAL for event in read(path))


def _events(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(event, dict) and _is_whole(event):
            yield event


_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("event", "stage", "attempt", "sha256", "path", "error", "state"), str),
    **dict.fromkeys(("scale", "environment", "values", "reads"), dict),
    **dict.fromkeys(("time", "seconds"), (int, float)),
    "step": int,
}
_MAX_NUMBER = 1e15
"""Beyond any time or step; a database would refuse it."""


def _is_whole(event: Event) -> bool:
    """Whether its readers can use an event; a line from elsewhere is read over like a torn one."""
    if "event" not in event or (str(event["event"]).startswith("stage_") and "stage" not in event):
        return False
    return all(_fits(event[name], kind) for name, kind in _TYPES.items() if name in event)


def _fits(value: Any, kind: type | tuple[type, ...]) -> bool:
    number = float(value) if isinstance(value, (int, float)) else 0.0
    return isinstance(value, kind) and abs(number) < _MAX_NUMBER


def runs(folder: Path) -> list[str]:
    """All run ids, oldest first."""
    return sorted(path.stem for path in folder.glob("*.jsonl") if path.is_file())


def is_alive(folder: Path, run: str) -> bool:
    """Whether some process still holds the run's lock."""
    path = folder / f"{run}.lock"
    if not path.exists():
        return False
    with path.open("r") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def reap(folder: Path) -> list[str]:
    """Mark every run that ended without a word as lost; their ids."""
    lost = []
    for run in runs(folder):
        path = folder / f"{run}.jsonl"
        if is_alive(folder, run) or has_ended(path):
            continue
        Journal(folder, run).write("run_lost")
        lost.append(run)
    return lost


def state_of(events: list[Event], alive: bool) -> str:
    """running, lost, or the state that the run ended with."""
    for event in reversed(events):
        if event["event"] == "run_finished":
            return str(event.get("state", "failed"))
        if event["event"] == "run_lost":
            return "lost"
    return "running" if alive else "lost"
