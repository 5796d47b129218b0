"""Rules: what is missing is said with what to do about it, before hours are spent."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import doctor
from flows.cli import CONFIG, DONE, main


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOOPD_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(doctor, "_MIN_FREE_GB", 0.0)
    return tmp_path


def test_a_fit_machine_passes_and_a_scale_names_what_it_lacks(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == DONE
    assert main(["doctor", "--scale", "smoke"]) == DONE
    capsys.readouterr()
    assert main(["doctor", "--scale", "mini"]) == CONFIG
    said = capsys.readouterr().out
    assert "--set data.path=PLACE" in said and "--set model.path=PLACE" in said
    given = ["--set", f"data.path={home}", "--set", "model.path=org/name"]
    assert main(["doctor", "--scale", "mini", *given]) == DONE


def test_both_faiss_wheels_a_missing_package_and_a_full_disk_are_faults(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "bm25s" else "1.0")
    monkeypatch.setattr(doctor, "_MIN_FREE_GB", 1e9)
    assert main(["doctor"]) == CONFIG
    said = capsys.readouterr().out
    assert "uninstall one of them" in said and "make setup" in said
    assert "free some" in said


def test_the_plan_of_the_papers_scale_says_what_it_costs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--scale", "paper"]) == DONE
    said = capsys.readouterr().out
    assert "GPU hours" in said and "train multiagent_opd" in said
    assert "0 s by the last timings, and 26 stages that were never timed" in said
