"""The whole chain at scale smoke through the command line, run once; then what users do with it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.home import ROOT
from tests.flows.shell import Shell, kill_9


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Case 35. A finished smoke chain of all eight rows, in a home with a space and accents."""
    shell = Shell(tmp_path_factory.mktemp("état de fait"))
    output = shell("run", "--scale", "smoke")
    assert "Report:" in output and "compareRunsMode=CHART" in output
    yield shell


RUN = ("run", "--scale", "smoke")


def test_the_chain_leaves_a_report_with_nine_rows(shell: Shell) -> None:
    report = json.loads((shell.artifact("report") / "report.json").read_text())
    assert len(report["systems"]) == 9
    assert report["num_attempts"] == 4
    html = (shell.artifact("report") / "report.html").read_text()
    assert "MultiAgent-OPD" in html and "default-src 'none'" in html
    assert "ERROR" not in shell("status")


def test_a_second_run_finds_everything_cached_without_torch(shell: Shell) -> None:
    since = len(shell.events())
    code = (
        "import sys\nfrom flows.cli import main\n"
        f"status = main(['--home', {str(shell.home)!r}, 'run', '--scale', 'smoke'])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'\n"
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=shell.environment(),
                          capture_output=True, text=True, timeout=200, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert shell.executed(since) == []
    cached = [e for e in shell.events()[since:] if e["event"] == "stage_cached"]
    assert len(cached) == 3 + 2 * 6 + 9 + 2


def test_plan_says_cached_then_names_the_facet_that_changed(shell: Shell) -> None:
    assert "stale" not in shell("plan", "--scale", "smoke")
    changed = shell("plan", "--scale", "smoke", "--set", "retrieval.top_k=2")
    assert "config.retrieval.top_k: 3 -> 2" in changed


def test_a_removed_artifact_is_recomputed_alone(shell: Shell) -> None:
    """Case 28, a removed file."""
    before, since = shell.digests(), len(shell.events())
    (shell.artifact("freeze/multiagent_opd") / "history.json").unlink()
    shell(*RUN)
    assert shell.executed(since) == ["freeze/multiagent_opd"]
    assert shell.digests() == before
    assert list((shell.home / "quarantine").iterdir())


def test_force_runs_a_stage_again_and_equal_bytes_stop_there(shell: Shell) -> None:
    before, since = shell.digests(), len(shell.events())
    shell(*RUN, "--only", "evaluate/cmas_base", "--force", "evaluate/cmas_base")
    assert shell.executed(since) == ["evaluate/cmas_base"]
    assert shell.digests() == before


def test_a_constant_in_a_helper_of_a_stage_makes_it_stale_and_is_named(
    shell: Shell, tmp_path: Path
) -> None:
    """Case 29. The same home seen from a copy of the sources in which one number differs."""
    for part in ("moopd", "tasks", "flows", "configs"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    plan = ("plan", "--scale", "smoke")
    elsewhere = shell.of(tmp_path)
    # Where the sources lie is no facet.
    assert {"stale", "missing", "waiting"}.isdisjoint(elsewhere(*plan).split())
    helper = tmp_path / "moopd" / "rl" / "advantages.py"
    text = helper.read_text()
    changed = text.replace("EPSILON = 1e-6", "EPSILON = 1e-5")
    assert changed != text
    helper.write_text(changed)
    rows = {cells[1]: cells for line in elsewhere(*plan).splitlines()
            if len(cells := [cell.strip() for cell in line.split("│")]) > 4}  # fmt: skip
    assert rows["train/cmas_rl"][2] == "stale"
    assert rows["train/cmas_rl"][3].startswith("sources.moopd/rl: ")
    assert [name for name, cells in rows.items() if cells[2] == "cached"] == [
        "prepare", "index", "base", "evaluate/cmas_base", "evaluate/hmas_base",
    ]  # fmt: skip


def test_exit_codes(shell: Shell, tmp_path: Path) -> None:
    assert "unknown system" in shell(*RUN, "--system", "nope", code=2)
    assert "unknown key" in shell(*RUN, "--set", "training.lrr=1", code=2)
    assert "no stage 'nope'" in shell(*RUN, "--only", "nope", code=2)
    empty = Shell(tmp_path / "empty")
    assert "missing upstream" in empty(*RUN, "--only", "train/cmas_rl", code=3)
    (tmp_path / "file").write_text("")
    started = time.monotonic()
    assert "cannot be written" in Shell(tmp_path / "file" / "home")("status", code=2)
    assert time.monotonic() - started < 10


def test_the_team_answers_in_the_terminal(shell: Shell) -> None:
    said = shell(
        "ask", "who directed the film silver tower", "--scale", "smoke", "--system", "cmas_rl"
    )
    assert "Answer" in said and "environment steps" in said


def test_records_are_scored_from_files_alone(shell: Shell) -> None:
    (records,) = shell.artifact("evaluate/cmas_rl").glob("*.parquet")
    questions = shell.artifact("prepare") / "questions_test.jsonl"
    assert "C-MAS + RL" in shell("score", str(records), "--questions", str(questions))


KILLS = (("base", "stage_started", 1.0), ("train/cmas_rl", "metrics", 0.0),
         ("evaluate/cmas_rl", "stage_started", 0.0))  # fmt: skip
"""(stage, journal event, seconds after it)."""


def test_three_kills_lead_to_the_bytes_of_an_undisturbed_run(shell: Shell, tmp_path: Path) -> None:
    """Case 32. Warm start, Stage I and an evaluation lose all processes (kill -9) in one chain."""
    other = Shell(tmp_path / "killed")
    chain = (*RUN, "--system", "cmas_rl")
    for stage, event, after_s in KILLS:
        process = other.start(*chain)
        try:
            other.wait_for(event, stage)
            time.sleep(after_s)
        finally:
            kill_9(process)
    other(*chain)
    ours, theirs = other.digests(), shell.digests()
    for stage in ("prepare", "index", "base", "train__cmas_rl", "evaluate__cmas_rl"):
        assert ours[stage] == theirs[stage], stage
    states = [e["event"] for e in other.events() if e["event"] in ("run_lost", "run_finished")]
    assert states == ["run_lost"] * len(KILLS) + ["run_finished"]
