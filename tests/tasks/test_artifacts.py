"""Rules: an artifact is sealed by one rename; what was there is put aside; one computes at once."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from moopd.types import ArtifactRef
from tasks import artifacts
from tasks.home import Home, open_home

KEY = "k" * 64


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(str(tmp_path / "hôme with blank"))


def make(home: Home, key: str = KEY, text: str = "x", stage: str = "train/a") -> ArtifactRef:
    folder = artifacts.temporary_path(home, stage, key)
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "data.txt").write_text(text)
    return artifacts.finish(folder, home, stage, key, {"seed": 1}, 1.25, "run-1")


def test_before_it_is_sealed_nothing_is_found(home: Home) -> None:
    folder = artifacts.temporary_path(home, "train/a", KEY)
    (folder / "data.txt").write_text("half")
    assert artifacts.find(home, "train/a", KEY) is None
    assert artifacts.previous(home, "train/a") is None
    # Even with a manifest: the rename is what makes it one.
    (folder / artifacts.MANIFEST).write_text("{}")
    assert artifacts.find(home, "train/a", KEY) is None
    assert artifacts.previous(home, "train/a") is None


def test_a_crash_while_sealing_leaves_no_artifact_and_the_next_try_starts_empty(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("power")))
        with pytest.raises(OSError, match="power"):
            make(home)
    assert artifacts.find(home, "train/a", KEY) is None
    assert list(artifacts.temporary_path(home, "train/a", KEY).iterdir()) == []
    make(home)
    (only,) = (home.artifacts / "train__a").iterdir()
    assert only == artifacts.final_path(home, "train/a", KEY)


def test_the_manifest_is_written_last(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(artifacts, "_flush", lambda path: flushed.append(path.name))
    make(home)
    assert flushed == ["data.txt", artifacts.MANIFEST, "train__a"]


def test_what_was_sealed_is_found_with_what_it_was_made_from(home: Home) -> None:
    ref = make(home)
    found = artifacts.find(home, "train/a", KEY, deep=True)
    assert found == artifacts.Artifact(ref, {"seed": 1}, 1.25, "run-1")
    assert artifacts.find(home, "train/a", "other" + KEY) is None


def test_a_missing_file_a_missing_manifest_and_another_digest_are_named(home: Home) -> None:
    ref = make(home)
    folder = Path(ref.path)
    assert "expected 0000" in str(artifacts.verify(ArtifactRef("train/a", ref.path, "0" * 64)))
    (folder / "deep" / "er" / "data.txt").unlink()
    assert "data.txt is missing" in str(artifacts.verify(ref))
    assert artifacts.find(home, "train/a", KEY) is None
    for torn in ('{"stage": "tr', None):
        if torn is None:
            (folder / artifacts.MANIFEST).unlink()
        else:
            (folder / artifacts.MANIFEST).write_text(torn)
        assert "no readable" in str(artifacts.verify(ref))
        assert artifacts.find(home, "train/a", KEY) is None


def test_sealing_over_an_artifact_keeps_the_old_bytes_in_quarantine(home: Home) -> None:
    make(home, text="old")
    new = make(home, text="new")
    (kept,) = home.quarantine.iterdir()
    assert (kept / "deep" / "er" / "data.txt").read_text() == "old"
    assert kept.name.startswith(f"train__a__{KEY[:16]}.")
    assert artifacts.verify(new, deep=True) is None
    make(home, text="newer")
    assert len(list(home.quarantine.iterdir())) == 2
    artifacts.quarantine(home, home.artifacts / "train__a" / "never was")


def test_the_newest_artifact_of_a_stage_is_what_a_plan_compares_with(home: Home) -> None:
    for age, name in ((30, "a"), (10, "b"), (20, "c")):
        ref = make(home, name * 64, text=name)
        manifest = Path(ref.path) / artifacts.MANIFEST
        then = manifest.stat().st_mtime - age
        os.utime(manifest, (then, then))
    newest = artifacts.previous(home, "train/a")
    assert newest is not None and newest.ref.path.endswith("b" * 16)
    assert artifacts.previous(home, "train/b") is None


def test_the_digest_is_over_names_and_bytes_not_over_when_or_how_long(home: Home) -> None:
    first, second = make(home, "a" * 64), make(home, "b" * 64)
    assert first.sha256 == second.sha256
    folder = artifacts.temporary_path(home, "train/a", "c" * 64)
    (folder / "moved.txt").write_text("x")
    moved = artifacts.finish(folder, home, "train/a", "c" * 64, {}, 9.0, "run-2")
    assert moved.sha256 != first.sha256
    manifest = json.loads((Path(moved.path) / artifacts.MANIFEST).read_text())
    assert list(manifest["files"]) == ["moved.txt"]


def test_one_holder_of_a_key_at_a_time_and_other_keys_are_free(home: Home) -> None:
    entered = threading.Event()

    def second() -> None:
        with artifacts.locked(home, KEY):
            entered.set()

    with artifacts.locked(home, KEY):
        waiting = threading.Thread(target=second)
        waiting.start()
        with artifacts.locked(home, "other"):
            assert not entered.wait(0.2)
    assert entered.wait(5)
    waiting.join()
