"""Whether `moopd up` serves a home, and where.

Its process holds a lock, which the kernel frees however it ends: the addresses that a killed one
leaves behind may be those of another home's servers by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Iterator
from typing import IO

from tasks.home import Home


@contextlib.contextmanager
def claim(home: Home) -> Iterator[bool]:
    """Serve the home until the end of the block; False when another process does already."""
    with home.server_lock.open("w") as stream:
        yield _locks(stream)


def _locks(stream: IO[str]) -> bool:
    """Whoever only asks holds the lock for a moment: a few tries."""
    for _ in range(20):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.02)
    return False


def is_served(home: Home) -> bool:
    try:
        with home.server_lock.open("r") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def addresses(home: Home) -> dict[str, str]:
    """Where the pages of a served home are; empty while they come up or where nothing serves."""
    if not is_served(home):
        return {}
    try:
        found = json.loads(home.server.read_text())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}
