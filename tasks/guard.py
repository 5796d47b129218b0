"""A command with all that it starts, ended together: `python -m tasks.guard PARENT COMMAND ...`.

Servers start processes of their own, which would outlive a kill -9 of whoever started the server:
the kernel tells only its children. So this stands between, as the leader of their group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG = 1
_GRACE_S = 10.0


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent goes, however it goes."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def main() -> int:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, _raise)
    end_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except SystemExit:
        _end_group(process)
        raise


def _raise(_number: int, _frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + signal.SIGTERM)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to all, a while for the first one to end them in order, SIGKILL to what is left."""
    os.killpg(0, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
