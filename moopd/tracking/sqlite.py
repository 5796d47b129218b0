"""Is a sqlite file whole? What only shows what a journal says is put aside and made anew."""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_SIBLINGS = ("", "-wal", "-shm", "-journal")


def damaged(database: Path, wait_s: float = 5.0) -> str | None:
    """What is wrong with a database that is there, or None. A busy one is not damaged."""
    try:
        with closing(sqlite3.connect(database, timeout=wait_s)) as connection:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error) if error.sqlite_errorcode & 0xFF in _DAMAGED else None
    if said != "ok":
        return str(said)
    return None if tables else "it has no tables"


def put_aside(database: Path) -> Path:
    """Move a database and what belongs to it out of the way; nothing is deleted."""
    stamp = time.time_ns()
    for sibling in _SIBLINGS:
        path = database.with_name(database.name + sibling)
        if path.exists():
            os.replace(path, path.with_name(f"{path.name}.damaged-{stamp}"))
    return database.with_name(f"{database.name}.damaged-{stamp}")
