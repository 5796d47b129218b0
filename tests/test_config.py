"""Rules: a number that cannot be meant is refused with its key, what was got and what is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from moopd.config import ConfigError, load_scale
from tasks.configuration import load_configuration, wanted_systems
from tasks.home import CONFIGS

SMOKE = CONFIGS / "scale" / "smoke.yaml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.lr=.nan", "training.lr: Input should be"),
        ("training.lr=-1", "training.lr: Input should be greater than 0"),
        ("training.beta=.inf", "training.beta: Input should be"),
        ("training.clip_ratio=-3", "training.clip_ratio"),
        ("warm_start.noise.no_search=7", "less than or equal to 1"),
        ("model.num_heads=0", "model.num_heads"),
        ("seed=-1", "seed: Input should be greater than or equal to 0"),
        ("seed=100000000000000000000000", "seed: Input should be less than"),
        ("statistics.seed=-1", "statistics.seed"),
        ("data.test_sizes={nq: -3}", "data.test_sizes.nq"),
        ("deadline_hours=1e300", "deadline_hours"),
        ("training.lr=[1", "expected YAML; put text in quotes"),
        ("training.lr=!!python/object/apply:os.system [ls]", "could not determine a constructor"),
        ('name="a', "expected YAML"),
        ("seed=\ud800", "expected YAML"),
        ("data.path=\0", "expected YAML"),
        ("training", "expected section.key=value"),
        ("seed.x=1", "'seed' is a value, not a section"),
        (f"training.lr={'x' * 500}", "xxx..."),
    ],
)
def test_an_override_that_cannot_be_meant_is_refused(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_scale(SMOKE, [override])
    assert said in str(refused.value) and len(str(refused.value)) < 900


@pytest.mark.parametrize(
    ("text", "said"),
    [("- a\n- b\n", "got a list"), ("seed: [", "expected YAML"), ("just words", "got a str")],
)
def test_a_scale_that_is_no_mapping_is_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as refused:
        load_scale(tmp_path / "mine.yaml")
    assert "mine.yaml" in str(refused.value)
    (tmp_path / "mine.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_scale(tmp_path / "mine.yaml")


@pytest.mark.parametrize("name", ["", "..", "../scale/smoke", "/etc/passwd", "x" * 400, "a\0b"])
def test_a_scale_is_one_of_the_known_names(name: str) -> None:
    with pytest.raises(ConfigError, match="known: mini, paper, small, smoke, tiny"):
        load_configuration(name, ())


def test_a_row_that_is_named_twice_is_run_once() -> None:
    settings, rows = load_configuration("smoke", ["systems=[cmas_rl, cmas_rl]"])
    assert wanted_systems(settings, rows, None) == ("cmas_rl",)
    assert wanted_systems(settings, rows, ["hmas_base"] * 3) == ("hmas_base",)


def test_systems_that_are_no_rows_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "mine.yaml").write_text("name: mine\n")
    monkeypatch.setattr("tasks.configuration.CONFIGS", tmp_path)
    for text in ("a: 5\n", "a: {name: a}\n", "a: {title: x, workflow: ring}\n", "- a\n", "a: ["):
        (tmp_path / "systems.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"systems\.yaml"):
            load_configuration("mine", ())
