"""Rules: whatever lies in a home or stands on the command line, a command says what is wrong."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from flows import servers
from flows.cli import CONFIG, DONE, MISSING, main
from moopd.config import ConfigError
from moopd.printable import printable
from moopd.tracking.journal import Journal, read
from tasks import artifacts, serving
from tasks.home import Home, open_home

GARBAGE = (
    b"\xff\xfe\x00garbage\n" + b"[" * 100_000 + b"\nnull\n[1]\n{}\n"
    b'{"event": 5}\n{"event": "stage_finished"}\n{"event": "stage_started", "stage": 7}\n'
    b'{"event": "run_started", "scale": "x"}\n{"event": "metrics", "time": "soon"}\n'
    b'{"event": "run_finished", "time": 1e300}\n{"event": "run_fini'
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("MOOPD_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return open_home()


def said(capsys: pytest.CaptureFixture[str]) -> str:
    text = capsys.readouterr()
    assert "Traceback" not in text.err
    return text.out + text.err


def test_garbage_in_the_journal_is_read_over(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    book = Journal(home.journal, "r1")
    book.write("run_started", scale={"name": "smoke"})
    with book.path.open("ab") as stream:
        stream.write(GARBAGE)
    book.write("run_finished", state="finished")
    assert [event["event"] for event in read(book.path)] == ["run_started", "run_finished"]
    (home.journal / "r2.jsonl").write_bytes(GARBAGE)
    (home.journal / "r3.jsonl").touch()
    (home.journal / "r4.jsonl").mkdir()
    Journal(home.journal, "r5").write("run_lost")
    assert main(["status"]) == DONE
    rows = said(capsys)
    assert "finished" in rows and "lost" in rows and "-1" not in rows


def test_what_a_killed_server_left_behind_is_not_believed(home: Home) -> None:
    """Another home's server may answer at the address by now."""
    with socket.socket() as other:
        other.bind((servers.HOST, 0))
        other.listen()
        address = f"http://{servers.HOST}:{other.getsockname()[1]}"
        home.server.write_text(json.dumps({"prefect": address, "mlflow": address}))
        assert serving.addresses(home) == {} and servers.running(home) == {}
        with serving.claim(home) as mine:
            assert mine and serving.is_served(home)
            assert serving.addresses(home)["prefect"] == address
            with serving.claim(home) as second:
                assert not second
    for text in ("", "[]", "5", '{"prefect": 5}', '{"prefect": "file:///etc/passwd"}', '{"x": []}'):
        home.server.write_text(text)
        with serving.claim(home):
            assert servers.running(home) == {}
    assert not serving.is_served(home)


def test_a_second_server_of_a_home_is_not_started(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving.claim(home):
        assert servers.serve(home) == DONE
    assert "served already" in said(capsys)


def test_a_server_that_speaks_something_else_is_none_of_ours(home: Home) -> None:
    assert not servers._answers("prefect", "nonsense")
    assert not servers._answers("prefect", "http://127.0.0.1:99999")


def test_a_damaged_database_of_prefect_is_put_aside(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    (home.prefect / "ready").touch()
    (home.prefect / "prefect.db").write_bytes(b"garbage" * 1000)
    with servers._starting(home):
        assert not (home.prefect / "prefect.db").exists()
    (kept,) = home.prefect.glob("prefect.db.damaged-*")
    assert kept.read_bytes() == b"garbage" * 1000 and str(kept) in said(capsys)


def test_a_server_that_ends_at_its_start_is_named_with_its_last_word(home: Home) -> None:
    (home.root / "prefect-server.log").write_text("Traceback\nError: port 4200 is taken\n\n")
    assert "port 4200 is taken" in servers._why(home, "prefect")
    assert "see " in servers._why(home, "mlflow")


def seal(home: Home, stage: str) -> Path:
    folder = artifacts.temporary_path(home, stage, "k" * 64)
    (folder / "report.html").write_text("<p>")
    return Path(artifacts.finish(folder, home, stage, "k" * 64, {}, 1.0, "r").path)


@pytest.mark.parametrize("name", ["stage", "key", "sha256", "files", "facets", "seconds", "run"])
def test_a_manifest_changed_by_hand_is_no_hit_and_nothing_to_show(
    home: Home, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    manifest = seal(home, "report") / artifacts.MANIFEST
    assert main(["report"]) == DONE
    whole = json.loads(manifest.read_text())
    others = [{k: v for k, v in whole.items() if k != name}, {**whole, name: ["x"]}]
    if name == "files":
        others.append({**whole, "files": {"report.html": [3, "0" * 64]}})
    for tree in others:
        manifest.write_text(json.dumps(tree))
        assert artifacts.find(home, "report", "k" * 64) is None
        assert artifacts.previous(home, "report") is None
        assert main(["report"]) == MISSING
    assert "missing upstream: report" in said(capsys)


def test_bytes_that_changed_are_not_shown(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    (seal(home, "report") / "report.html").write_text("<b>")
    assert main(["report"]) == MISSING
    assert main(["compare"]) == MISSING
    assert main(["report", "--render", str(home.root / "x")]) == MISSING


def test_missing_upstream_is_listed_whole(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["ask", "who?"], ["retrieve", "serve"]):
        row = ["--system", "cmas_rl"] if command[0] == "ask" else []
        assert main([*command, "--scale", "smoke", *row]) == MISSING
    first, second = said(capsys).splitlines()
    assert "missing upstream: prepare, index, base, train/cmas_rl, freeze/cmas_rl;" in first
    assert "missing upstream: prepare, index;" in second


def test_a_question_that_is_no_text_is_refused(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    for text, word in (("", "empty"), (" \n", "empty"), ("who \udcff", "no UTF-8")):
        assert main(["ask", text, "--scale", "smoke", "--system", "cmas_rl"]) == CONFIG
        assert word in said(capsys)


def test_text_from_outside_cannot_act_on_a_terminal() -> None:
    assert printable("red\x1b[31m\x1b]0;x\x07 \u202eabc\x9b \ud800\0\r") == (
        "red\ufffd[31m\ufffd]0;x\ufffd \ufffdabc\ufffd \ufffd\ufffd\ufffd"
    )
    assert printable("é 家 👩‍🚀\n\tplain [red]") == "é 家 👩‍🚀\n\tplain [red]"


def test_a_port_that_cannot_be_used_is_said_before_anything_is_read(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind((servers.HOST, 0))
        taken.listen()
        for port in ("99999", str(taken.getsockname()[1])):
            assert main(["retrieve", "serve", "--scale", "smoke", "--port", port]) == CONFIG
            assert f"port {port} cannot be used" in said(capsys)


@pytest.mark.parametrize(
    "arguments",
    [["--seeds", "0"], ["--seeds", "-1"], ["--seeds", "x"], ["--only", "base", "--from", "base"]],
)
def test_options_that_say_nothing_are_refused(home: Home, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", "--scale", "smoke", *arguments])
    assert ended.value.code == CONFIG


def test_a_place_that_cannot_be_used_is_named(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    long = str(home.root / ("x" * 400))
    assert main(["score", f"{long}.jsonl", "--questions", "q"]) == CONFIG
    assert "File name too long" in said(capsys)
    (home.root / "file").write_text("")
    os.rmdir(home.artifacts)
    home.artifacts.write_text("")
    assert main(["status"]) == CONFIG
    assert "cannot be written" in said(capsys)


def test_a_store_that_mlflow_refuses_is_said_with_what_to_do(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("Detected out-of-date schema\n(take a backup)")

    monkeypatch.setattr("moopd.tracking.mlflow_mirror.Mirror", refuse)
    with (
        pytest.raises(ConfigError, match="out-of-date schema"),
        servers.mlflow_store(home),
    ):
        pass


def test_a_full_disk_is_not_taken_for_a_broken_store(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_SMALL_BYTES", 2**62)
    with pytest.raises(ConfigError, match="no space left"), servers.mlflow_store(home):
        raise RuntimeError("database or disk is full")
