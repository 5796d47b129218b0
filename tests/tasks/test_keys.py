"""Rules: a key follows what is read, by content; places, names of folders and threads are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moopd.config import ConfigError, load_scale
from moopd.systems import load_systems
from moopd.types import ArtifactRef
from tasks import keys
from tasks.home import CONFIGS
from tasks.keys import changed, facets, key_of
from tasks.stages import Stage, pipeline

SYSTEMS = load_systems(CONFIGS / "systems.yaml")


def stage(name: str, *overrides: str) -> Stage:
    scale = load_scale(CONFIGS / "scale" / "smoke.yaml", overrides)
    return next(s for s in pipeline(scale, SYSTEMS, tuple(SYSTEMS)) if s.name == name)


def key(name: str, *overrides: str) -> str:
    chosen = stage(name, *overrides)
    inputs = {need: ArtifactRef(need, "/x", f"digest-{need}") for need in chosen.needs}
    return key_of(facets(chosen, inputs))


def files_in(folder: Path, **texts: str) -> tuple[str, ...]:
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.jsonl").write_text(text)
    return ("data.source=files", f"data.path={folder}")


def test_data_are_known_by_their_bytes_and_names_wherever_they_lie(tmp_path: Path) -> None:
    first = key("prepare", *files_in(tmp_path / "a", questions="1", corpus="2"))
    assert key("prepare", *files_in(tmp_path / "b c", questions="1", corpus="2")) == first
    assert key("prepare", *files_in(tmp_path / "d", questions="1", corpus="3")) != first
    assert key("prepare", *files_in(tmp_path / "e", question="1", corpus="2")) != first


def test_a_file_rewritten_in_place_is_read_again(tmp_path: Path) -> None:
    overrides = files_in(tmp_path / "a", questions="1")
    before = key("prepare", *overrides)
    file = tmp_path / "a" / "questions.jsonl"
    stamp = file.stat().st_mtime_ns
    file.write_text("2")
    os.utime(file, ns=(stamp + 1_000_000, stamp + 1_000_000))
    assert key("prepare", *overrides) != before


def test_a_model_folder_is_known_by_its_files_and_a_hub_name_by_its_name(tmp_path: Path) -> None:
    for place in ("here", "there"):
        model = tmp_path / place / "small"
        model.mkdir(parents=True)
        (model / "model.safetensors").write_bytes(b"weights")
    pretrained = "model.kind=pretrained"
    first, moved = (
        key("base", pretrained, f"model.path={tmp_path / place / 'small'}")
        for place in ("here", "there")
    )
    assert first == moved
    (tmp_path / "there" / "small" / "model.safetensors").write_bytes(b"others!")
    keys._file_digest.cache_clear()
    assert key("base", pretrained, f"model.path={tmp_path / 'there' / 'small'}") != first
    names = {key("base", pretrained, f"model.path=org/{name}") for name in ("one", "two")}
    assert len(names) == 2


def test_where_a_judge_answers_is_no_part_of_a_key_and_who_it_is_is() -> None:
    http = ("critic.kind=http", "critic.url=http://127.0.0.1:1", "critic.model=m")
    first = key("train/prompted_critic", *http)
    moved = ("critic.url=http://127.0.0.1:2", "critic.timeout_s=9", "critic.max_tries=2")
    assert key("train/prompted_critic", *http, *moved, "critic.max_concurrent=3") == first
    assert key("train/prompted_critic", *http, "critic.model=n") != first
    assert key("train/prompted_critic", *http, "critic.max_retries=1") != first


def test_input_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        key("prepare", "data.source=files", f"data.path={tmp_path / 'nowhere'}")


@pytest.mark.parametrize(
    ("override", "stale"),
    [
        ("warm_start.steps=21", {"base"}),
        ("training.beta=0.2", {"train/cmas_rl"}),
        ("retrieval.top_k=2", {"index", "base", "train/cmas_rl", "evaluate/cmas_base"}),
        ("workflow.hierarchy_steps=7", {"base", "train/cmas_rl", "evaluate/cmas_base"}),
        ("statistics.num_draws=300", set()),
    ],
)
def test_a_number_makes_stale_what_reads_it(override: str, stale: set[str]) -> None:
    names = ("prepare", "index", "base", "train/cmas_rl", "freeze/cmas_rl", "evaluate/cmas_base")
    assert {name for name in names if key(name) != key(name, override)} == stale
    assert key("statistics") != key("statistics", override)


def test_every_stage_has_a_key_of_its_own() -> None:
    scale = load_scale(CONFIGS / "scale" / "smoke.yaml")
    names = [s.name for s in pipeline(scale, SYSTEMS, tuple(SYSTEMS), 2)]
    assert len(names) == len(set(names))
    for one, other in (("train/opd_base_teacher", "train/opd_no_searcher_loss"),
                       ("evaluate/multiagent_opd", "evaluate/multiagent_opd_last")):  # fmt: skip
        assert key(one) != key(other)


def test_what_changed_is_said_for_added_removed_and_nested_facets() -> None:
    old = {"seed": 0, "config": {"a": {"b": 1, "gone": True}}, "same": [1]}
    new = {"seed": 1, "config": {"a": {"b": 2}}, "same": [1], "files": {"f": "0" * 64}}
    assert list(changed(old, new)) == [
        "config.a.b: 1 -> 2",
        "config.a.gone: true -> null",
        # Of 73 characters the first and the last 12.
        'files: null -> {"f": "00000...0000000000"}',
        "seed: 0 -> 1",
    ]
    assert list(changed(new, new)) == []


def test_a_patch_release_of_a_package_changes_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for release in ("2.13.0+cpu", "2.13.7", "2.14.0"):
        monkeypatch.setattr(keys, "version", lambda _, release=release: release)
        keys.environment.cache_clear()
        found.append(keys.environment()["torch"])
    keys.environment.cache_clear()
    assert found == ["2.13", "2.13", "2.14"]
