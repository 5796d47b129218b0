"""Rules: keys are content, artifacts are whole or not there, teachers come before students."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moopd.config import ConfigError, load_scale
from moopd.systems import load_systems
from moopd.types import ArtifactRef
from tasks import artifacts, keys
from tasks.home import CONFIGS, ROOT, Home, open_home
from tasks.keys import changed, facets, key_of, source_digest
from tasks.stages import Stage, levels, pipeline

SYSTEMS = load_systems(CONFIGS / "systems.yaml")


def stages(seeds: int = 1, *overrides: str) -> list[Stage]:
    scale = load_scale(CONFIGS / "scale" / "smoke.yaml", overrides)
    return pipeline(scale, SYSTEMS, tuple(SYSTEMS), seeds)


def fake_inputs(stage: Stage) -> dict[str, ArtifactRef]:
    return {name: ArtifactRef(name, f"/anywhere/{name}", f"digest-{name}") for name in stage.needs}


def make(home: Home, key: str = "k" * 64, text: str = "x") -> ArtifactRef:
    folder = artifacts.temporary_path(home, "prepare", key)
    (folder / "data.txt").write_text(text)
    return artifacts.finish(folder, home, "prepare", key, {"seed": 1}, 1.0, "run")


def test_every_stage_comes_after_what_it_needs_and_teachers_before_students() -> None:
    seen: set[str] = set()
    for level in levels(stages(seeds=2)):
        names = {stage.name for stage in level}
        for stage in level:
            assert set(stage.needs) <= seen
        seen |= names
    assert {"freeze/cmas_rl", "freeze/cmas_rl/1", "report"} <= seen


def test_each_seed_trains_against_its_own_teacher_and_untrained_rows_run_once() -> None:
    by_name = {stage.name: stage for stage in stages(seeds=2)}
    student = by_name["train/multiagent_opd/1"]
    assert student.teachers == {"cmas_rl": "freeze/cmas_rl/1"}
    assert student.seed == by_name["train/multiagent_opd"].seed + 1
    assert "evaluate/cmas_base" in by_name and "evaluate/cmas_base/1" not in by_name


def test_the_full_method_is_evaluated_at_both_checkpoints() -> None:
    rows = {s.row: s.checkpoint for s in stages() if s.kind == "evaluate"}
    assert len(rows) == 9
    assert (rows["multiagent_opd"], rows["multiagent_opd_last"]) == ("best", "last")
    assert rows["opd_no_searcher_loss"] == "last"


def test_a_key_depends_on_content_and_not_on_places() -> None:
    train = next(s for s in stages() if s.name == "train/cmas_rl")
    inputs = fake_inputs(train)
    key = key_of(facets(train, inputs))
    moved = {n: ArtifactRef(n, f"/elsewhere/{n}", r.sha256) for n, r in inputs.items()}
    assert key_of(facets(train, moved)) == key
    other = {**inputs, "base": ArtifactRef("base", "/anywhere/base", "other")}
    assert key_of(facets(train, other)) != key


def test_a_changed_number_is_named_with_old_and_new() -> None:
    before, after = (
        next(s for s in stages(1, *overrides) if s.name == "train/cmas_rl")
        for overrides in ((), ("training.beta=0.5",))
    )
    old, new = (facets(stage, fake_inputs(stage)) for stage in (before, after))
    assert list(changed(old, new)) == ["config.training.beta: 0.1 -> 0.5"]


def test_numbers_that_a_stage_does_not_read_leave_its_key_alone() -> None:
    found = [
        key_of(facets(stage, fake_inputs(stage)))
        for overrides in ((), ("training.beta=0.5", "evaluation.max_live_workflows=3"))
        for stage in stages(1, *overrides)
        if stage.name == "index"
    ]
    assert found[0] == found[1]


def test_a_constant_in_a_helper_module_changes_the_source_facet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "ROOT", tmp_path)
    helper = tmp_path / "helpers" / "a.py"
    helper.parent.mkdir()
    digests = []
    for text in ("X = 1\n", "X = 2\n", "X = 1\n"):
        helper.write_text(text)
        source_digest.cache_clear()
        digests.append(source_digest("helpers"))
    source_digest.cache_clear()
    assert digests[0] == digests[2] != digests[1]


def test_an_artifact_is_verified_by_size_and_by_bytes(tmp_path: Path) -> None:
    home = open_home(str(tmp_path))
    ref = make(home)
    assert artifacts.verify(ref, deep=True) is None
    file = Path(ref.path) / "data.txt"
    file.write_text("y")
    assert artifacts.verify(ref) is None
    assert "other bytes" in str(artifacts.verify(ref, deep=True))
    file.write_text("yy")
    assert "another size" in str(artifacts.verify(ref))
    assert artifacts.find(home, "prepare", "k" * 64) is None


def test_a_damaged_artifact_is_put_aside_not_deleted(tmp_path: Path) -> None:
    home = open_home(str(tmp_path))
    ref = make(home)
    artifacts.quarantine(home, Path(ref.path))
    assert not Path(ref.path).exists()
    assert len(list(home.quarantine.iterdir())) == 1


def test_the_same_bytes_have_the_same_digest_whatever_the_key(tmp_path: Path) -> None:
    home = open_home(str(tmp_path))
    assert make(home, "a" * 64).sha256 == make(home, "b" * 64).sha256
    assert make(home, "c" * 64, "other").sha256 != make(home, "d" * 64).sha256


def test_a_killed_holder_frees_the_lock(tmp_path: Path) -> None:
    home = open_home(str(tmp_path))
    code = (
        "import sys, time\nfrom tasks.home import open_home\nfrom tasks.artifacts import locked\n"
        f"with locked(open_home({str(tmp_path)!r}), 'key'):\n"
        "    print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    holder.send_signal(signal.SIGKILL)
    started = time.monotonic()
    with artifacts.locked(home, "key"):
        assert time.monotonic() - started < 10
    holder.wait()


def test_a_home_under_a_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_home(str(tmp_path / "file" / "home"))
