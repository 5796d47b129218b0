"""Where a run meets an end of something: time, space."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.flows.shell import Shell
from tests.flows.test_faults import NANO, UP_TO_BASE, left_over, mlflow_states

BASE = ("run", *NANO, "--only", "base")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A home on a file system of 150 MB with everything up to the index."""
    place = tmp_path_factory.mktemp("small")
    mount = ["mount", "-t", "tmpfs", "-o", "size=150m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small file system")
    try:
        shell = Shell(place / "home")
        shell("run", *NANO, "--only", "prepare", "--only", "index")
        yield shell
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


@pytest.mark.slow
def test_a_full_disk_fails_the_run_and_the_next_one_goes_on_to_the_same_bytes(
    small: Shell,
) -> None:
    process = small.start(*UP_TO_BASE)
    small.wait_for("stage_started", "base")
    filler = fill(small.home.parent)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 1, output[-2000:]
    assert "free" in output and "Traceback" not in output, output[-2000:]
    filler.unlink()
    since = len(small.events())
    small(*BASE)
    assert small.executed(since) == ["base"]
    after = small.digests()
    small(*BASE, "--force", "base")
    assert small.digests() == after
    assert mlflow_states(small) <= {"FINISHED", "FAILED", "KILLED"}


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with path.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(b"0" * 65536)
        except OSError:
            return path


def test_a_stage_that_overruns_its_deadline_is_cut_and_not_tried_again(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "home")
    shell("run", *NANO, "--only", "prepare", "--only", "index")
    since = len(shell.events())
    # 0.0005 h are 1.8 s; the worker needs more than that to import what it needs.
    said = shell(*BASE, "--set", "deadline_hours=0.0005", code=1)
    assert "overran its deadline of 2 s" in said and "Traceback" not in said
    kinds = [e["event"] for e in shell.events()[since:]]
    assert kinds.count("stage_started") == kinds.count("stage_failed") == 1
    assert left_over(shell) == []
    (page,) = (shell.home / "failures").iterdir()
    assert "base overran" in page.read_text()
    # A longer deadline changes no key: what is done stays done.
    since = len(shell.events())
    shell(*UP_TO_BASE, "--set", "deadline_hours=1")
    assert shell.executed(since) == ["base"]
