"""Rules: a torn line is dropped, a dead run is marked, a live one is left alone."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from moopd.tracking.journal import (
    Journal,
    first,
    has_ended,
    hold,
    is_alive,
    read,
    read_from,
    reap,
    runs,
    state_of,
)


def test_events_come_back_in_order_without_a_torn_last_line(tmp_path: Path) -> None:
    book = Journal(tmp_path, "r1")
    book.write("run_started", scale={"name": "x"})
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


def test_what_follows_a_torn_line_is_not_lost_with_it(tmp_path: Path) -> None:
    book = Journal(tmp_path, "r")
    book.write("run_started")
    with book.path.open("ab") as stream:
        stream.write(b'{"event": "stage_fin')
    assert reap(tmp_path) == ["r"]
    assert [event["event"] for event in read(book.path)] == ["run_started", "run_lost"]
    assert reap(tmp_path) == []
    with book.path.open("ab") as stream:
        stream.write(b'\xff\xfe\n[1]\n"text"\n')
    assert len(list(read(book.path))) == 2


def test_a_follower_reads_each_event_once_and_never_half_of_one(tmp_path: Path) -> None:
    book = Journal(tmp_path, "r")
    book.write("a")
    events, offset = read_from(book.path, 0)
    assert [event["event"] for event in events] == ["a"] and offset == book.path.stat().st_size
    line = json.dumps({"event": "b"}).encode() + b"\n"
    with book.path.open("ab") as stream:
        stream.write(line[:9])
    assert read_from(book.path, offset) == ([], offset)
    with book.path.open("ab") as stream:
        stream.write(line[9:])
    assert read_from(book.path, offset) == ([{"event": "b"}], offset + len(line))


def test_events_of_many_writers_stay_whole(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for step in range(20):
            Journal(tmp_path, "r").write("metrics", writer=number, step=step, text="é" * 5000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    events = list(read(tmp_path / "r.jsonl"))
    assert len(events) == 80
    for number in range(4):
        assert [e["step"] for e in events if e["writer"] == number] == list(range(20))


def test_the_end_of_a_run_is_seen_behind_a_long_tail(tmp_path: Path) -> None:
    book = Journal(tmp_path, "r")
    book.write("run_started", scale={"name": "x"})
    assert first(book.path)["scale"] == {"name": "x"} and not has_ended(book.path)
    book.write("run_finished", state="finished")
    for step in range(200):
        book.write("metrics", step=step, values={"loss": 0.5})
    assert book.path.stat().st_size > 4096 and has_ended(book.path)
    (tmp_path / "empty.jsonl").touch()
    assert first(tmp_path / "empty.jsonl") == {}
    assert runs(tmp_path) == ["empty", "r"]


def test_a_run_that_nobody_holds_and_that_said_nothing_more_is_lost_or_running() -> None:
    events = [{"event": "run_started"}, {"event": "stage_started", "stage": "a"}]
    assert (state_of(events, alive=True), state_of(events, alive=False)) == ("running", "lost")
