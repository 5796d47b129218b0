"""One subprocess in its own process group: deadline, streamed log, nothing left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

MARKER = "MOOPD_VERL_RUN"
"""Environment variable that every descendant inherits, also those that leave the group (Ray)."""
_GRACE_S = 15.0


class VerlError(RuntimeError):
    """The distributed trainer failed; the message holds the end of its log."""


@contextmanager
def only_launcher(work: Path) -> Iterator[None]:
    """One launcher a folder; what a launcher that died left running is ended first.

    The kernel drops the lock with its holder. Raises VerlError when another one holds it.
    """
    work.mkdir(parents=True, exist_ok=True)
    with (work / ".lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VerlError(
                f"another process is running the stage in {work}; wait for it or end it"
            ) from None
        for orphan in descendants(str(work)):
            _quietly(orphan.kill)
        yield


def run_to_end(
    command: Sequence[str],
    env: Mapping[str, str],
    work: Path,
    log: Path,
    deadline_s: float,
    poll: Callable[[], None],
    interval_s: float = 1.0,
) -> None:
    """Run `command` until it ends; `poll` is called about every `interval_s`.

    Raises VerlError for a non-zero exit or a passed deadline. However it ends, the whole process
    group and every descendant are gone when this returns.
    """
    end = time.monotonic() + deadline_s
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            env={**env, MARKER: str(work)},
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                raise VerlError(
                    f"verl passed its deadline of {deadline_s / 3600:.2f} hours; the last "
                    f"checkpoint is intact, start the stage again. {log_end(log)}"
                )
            poll()
            time.sleep(interval_s)
        poll()
    finally:
        end_group(process.pid, str(work))
        process.wait()
    if process.returncode != 0:
        raise VerlError(f"verl ended with exit code {process.returncode}. {log_end(log)}")


def end_group(group: int, marker: str) -> None:
    """End a process group and every process that carries `marker`: first asked, then killed."""
    members = descendants(marker)
    _signal_group(group, signal.SIGTERM)
    for member in members:
        _quietly(member.terminate)
    _, alive = psutil.wait_procs(members, timeout=_GRACE_S)
    _signal_group(group, signal.SIGKILL)
    for member in {*alive, *descendants(marker)}:
        _quietly(member.kill)


def descendants(marker: str) -> list[psutil.Process]:
    """Processes of this run, wherever in the process tree they are."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARKER) == marker:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def log_end(log: Path, num_lines: int = 30) -> str:
    """The last lines of a log, for an error message."""
    with log.open(encoding="utf-8", errors="replace") as stream:
        lines = deque(stream, maxlen=num_lines)
    return f"The log {log} ends with:\n{''.join(lines)}"


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _quietly(action: Callable[[], None]) -> None:
    try:
        action()
    except psutil.NoSuchProcess:
        return
