"""Rules: a database that only shows the journal is kept when damaged, and made anew."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from moopd.tracking.sqlite import damaged, put_aside
from moopd.tracking.store import _make_way


def make(database: Path) -> None:
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE runs (name TEXT)")
        connection.executemany("INSERT INTO runs VALUES (?)", [("x" * 500,)] * 100)


def test_damage_is_told_from_a_whole_and_from_a_busy_database(tmp_path: Path) -> None:
    database = tmp_path / "a b é.db"
    make(database)
    assert damaged(database) is None
    with closing(sqlite3.connect(database)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert damaged(database, wait_s=0) is None
    whole = database.read_bytes()
    for place in (0, 4096 + 5):
        database.write_bytes(whole[:place] + b"garbage" * 200 + whole[place + 1400 :])
        assert damaged(database)
    database.write_bytes(whole[: len(whole) // 2])
    assert damaged(database)
    database.write_bytes(b"")
    assert damaged(database) == "it has no tables"


def test_what_is_put_aside_keeps_its_bytes_and_its_log(tmp_path: Path) -> None:
    for name in ("m.db", "m.db-wal"):
        (tmp_path / name).write_text(name)
    kept = put_aside(tmp_path / "m.db")
    assert kept.read_text() == "m.db" and len(list(tmp_path.iterdir())) == 2
    assert not (tmp_path / "m.db").exists() and not (tmp_path / "m.db-wal").exists()


@pytest.mark.parametrize("state", ["whole", "damaged", "gone", "unfinished"])
def test_only_a_whole_finished_store_keeps_what_was_synced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    database = tmp_path / "mlflow.db"
    make(database)
    (tmp_path / "synced").mkdir()
    if state != "unfinished":
        (tmp_path / "experiments.json").write_text("{}")
    if state == "damaged":
        database.write_bytes(b"garbage" * 1000)
    elif state == "gone":
        database.unlink()
    _make_way(tmp_path)
    assert (tmp_path / "synced").exists() == database.exists() == (state == "whole")
    said = capsys.readouterr().err
    assert ("made anew from the journal" in said) == (state == "damaged")
    assert bool(list(tmp_path.glob("*.damaged-*"))) == (state == "damaged")
