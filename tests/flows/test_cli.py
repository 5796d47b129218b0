"""Rules: the command says what is wrong before it starts anything, and compares bytes if asked.

What needs the whole chain is in test_chain.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import CONFIG, DONE, MISSING, main
from flows.selection import Selection, matches
from moopd.config import load_scale
from moopd.systems import load_systems
from tasks.home import CONFIGS
from tasks.stages import Stage, pipeline
from tests.flows.shell import Shell

TWO = ("run", "--scale", "smoke", "--only", "prepare", "--only", "index")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands that only look do not need a process of their own."""
    monkeypatch.setenv("MOOPD_HOME", str(tmp_path / "ho me é"))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path / "ho me é"


def stages() -> list[Stage]:
    scale = load_scale(CONFIGS / "scale" / "smoke.yaml")
    systems = load_systems(CONFIGS / "systems.yaml")
    return pipeline(scale, systems, tuple(systems), 2)


def names(selection: Selection) -> list[str]:
    return [stage.name for stage in selection.wanted(stages())]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scale", "nope"], "nope"),
        (["--system", "nope"], "unknown system 'nope'"),
        (["--set", "training.lrr=1"], "lrr"),
        (["--set", "training.group_size=0"], "group_size"),
        (["--only", "trainn"], "no stage 'trainn'"),
        (["--from", "evaluate/nope"], "no stage 'evaluate/nope'"),
        (["--force", "x"], "no stage 'x'"),
    ],
)
def test_what_cannot_run_is_said_before_anything_starts(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    scale = [] if "--scale" in arguments else ["--scale", "smoke"]
    assert main(["run", *scale, *arguments]) == CONFIG
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown and shown.startswith("moopd: ")
    assert not list((home / "journal").glob("*.jsonl"))


def test_a_plan_of_an_empty_home_misses_all_and_a_dry_run_is_the_same(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for command in (["plan"], ["run", "--dry-run"]):
        assert main([*command, "--scale", "smoke", "--system", "cmas_rl"]) == DONE
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    # prepare lacks its artifact; the seven after it wait.
    assert shown[0].count("missing") == 1 and shown[0].count("waiting") == 7
    assert not list((home / "artifacts").iterdir())


def test_asking_an_untrained_team_names_the_first_stage_that_is_missing(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["ask", "who?", "--scale", "smoke"]
    assert main([*ask, "--system", "cmas_rl"]) == MISSING
    assert "missing upstream: prepare" in capsys.readouterr().err
    assert main(ask) == CONFIG
    assert main([*ask, "--system", "nope"]) == CONFIG
    assert "known: cmas_base" in capsys.readouterr().err


def test_status_of_an_empty_home_is_an_empty_table(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status"]) == DONE
    assert "run" in capsys.readouterr().out


def test_the_home_option_goes_before_the_variable(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--home", str(tmp_path / "other"), "status"]) == DONE
    assert (tmp_path / "other" / "journal").is_dir() and not home.exists()


def test_a_kind_means_all_its_stages_and_a_name_that_one() -> None:
    assert matches("train/cmas_rl", "train") and matches("train/cmas_rl/1", "train/cmas_rl")
    assert not matches("train/cmas_rl_x", "train/cmas_rl")
    assert not matches("train", "train/cmas_rl")
    assert names(Selection(only=("train/cmas_rl",))) == ["train/cmas_rl", "train/cmas_rl/1"]
    evaluated = names(Selection(only=("evaluate",)))
    assert evaluated and all(name.startswith("evaluate/") for name in evaluated)
    assert names(Selection(start="statistics")) == ["statistics", "report"]
    assert names(Selection(force=("base",))) == [stage.name for stage in stages()]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Data and index of scale smoke, made by the real command."""
    shell = Shell(tmp_path_factory.mktemp("deux étapes"))
    shell(*TWO)
    yield shell


def test_a_changed_byte_is_found_when_asked_and_its_stage_runs_alone(prepared: Shell) -> None:
    """Case 28, a damaged file."""
    before, since = prepared.digests(), len(prepared.events())
    file = prepared.artifact("prepare") / "corpus.jsonl"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    prepared(*TWO, "--verify")
    # The same bytes came out, so the index above it is still the right one.
    assert prepared.executed(since) == ["prepare"]
    assert prepared.digests() == before
    (aside,) = (prepared.home / "quarantine").iterdir()
    assert (aside / "corpus.jsonl").read_bytes() == bytes(data)
    facets = json.loads((prepared.artifact("index") / "artifact.json").read_text())["facets"]
    assert facets["inputs"] == {"prepare": before["prepare"]}
