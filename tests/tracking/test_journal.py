"""Rules: a torn line is dropped, a dead run is marked, a live one is left alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moopd.tracking.journal import Journal, hold, is_alive, read, reap, state_of


def test_events_come_back_in_order_without_a_torn_last_line(tmp_path: Path) -> None:
    book = Journal(tmp_path, "r1")
    book.write("run_started", scale="x")
    book.write("metrics", step=1)
    with book.path.open("ab") as stream:
        stream.write(b'{"event": "run_fin')
    assert [event["event"] for event in read(book.path)] == ["run_started", "metrics"]


def test_a_run_without_an_end_and_without_a_process_is_lost(tmp_path: Path) -> None:
    Journal(tmp_path, "dead").write("run_started")
    assert reap(tmp_path) == ["dead"]
    assert reap(tmp_path) == []
    assert state_of(list(read(tmp_path / "dead.jsonl")), alive=False) == "lost"


def test_a_live_run_is_not_reaped_and_a_killed_one_is(tmp_path: Path) -> None:
    with hold(tmp_path, "mine"):
        Journal(tmp_path, "mine").write("run_started")
        assert is_alive(tmp_path, "mine") and reap(tmp_path) == []
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom moopd.tracking.journal import *\n"
        f"stream = hold(Path({str(tmp_path)!r}), 'other')\n"
        f"Journal(Path({str(tmp_path)!r}), 'other').write('run_started')\n"
        "print('up', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    assert "other" not in reap(tmp_path)
    process.kill()
    process.wait()
    assert "other" in reap(tmp_path)


def test_a_finished_run_keeps_its_state(tmp_path: Path) -> None:
    book = Journal(tmp_path, "r")
    book.write("run_started")
    book.write("run_finished", state="failed")
    assert reap(tmp_path) == []
    assert state_of(list(read(book.path)), alive=False) == "failed"
