"""Worker processes of a run, each in a process group of its own, ended together with it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_GRACE_S = 3.0


class Children:
    """Thread-safe. Once closed, nothing more can be started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._attempts = threading.Condition(self._lock)
        self._num_attempts = 0
        self.closed = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around everything that a stage attempt writes; `close` waits for its end."""
        with self._lock:
            self._num_attempts += 1
        try:
            yield
        finally:
            with self._attempts:
                self._num_attempts -= 1
                self._attempts.notify_all()

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes] | None:
        """None when the run ends already."""
        with self._lock:
            if self.closed:
                return None
            process = subprocess.Popen(command, start_new_session=True, **options)
            self._processes.add(process)
        return process

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM to the whole group, SIGKILL to what is left of it after a moment."""
        with self._lock:
            self._processes.discard(process)
        end_group(process)

    def close(self) -> None:
        with self._lock:
            self.closed = True
            left = list(self._processes)
        for process in left:
            end_group(process)
        with self._attempts:
            self._attempts.wait_for(lambda: self._num_attempts == 0, timeout=_GRACE_S)


def end_group(process: subprocess.Popen[bytes], grace_s: float = _GRACE_S) -> None:
    """End a process and everything in its group, whether the leader lives or not."""
    deadline = time.monotonic() + grace_s
    number = int(signal.SIGTERM)
    while _signal_group(process.pid, number):
        process.poll()
        if time.monotonic() > deadline:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            return
        number = 0
        time.sleep(0.02)


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
