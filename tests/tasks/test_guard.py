"""Rules: what a server started ends with whoever started the server, however that one ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.home import ROOT

TREE = (
    "import os, signal, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal, time\\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\ntime.sleep(120)'])\n"
    "open({place!r}, 'w').write(f'{{os.getpid()}} {{child.pid}} ')\n"
    "time.sleep(120)\n"
)
"""A server with a worker that does not listen to SIGTERM."""

STARTER = (
    "import os, subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-m', 'tasks.guard', str(os.getpid()), sys.executable, "
    "'-c', {tree!r}], start_new_session=True)\n"
    "time.sleep(120)\n"
)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait(what: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_and_its_workers_end_with_whoever_started_it(tmp_path: Path, number: int) -> None:
    place = tmp_path / "pids"
    code = STARTER.format(tree=TREE.format(place=str(place)))
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        wait(lambda: place.exists() and place.read_text().endswith(" "))
        pids = [int(word) for word in place.read_text().split()]
        assert all(map(alive, pids))
        os.kill(starter.pid, number)
        starter.wait()
        wait(lambda: not any(map(alive, pids)))
    finally:
        starter.kill()


def test_the_status_of_the_command_is_passed_on() -> None:
    command = [sys.executable, "-m", "tasks.guard", str(os.getpid()), sys.executable, "-c"]
    assert subprocess.run([*command, "raise SystemExit(7)"], cwd=ROOT, check=False).returncode == 7
