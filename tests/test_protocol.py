"""Every value that the paper states, where a reader would look for it (docs/protocol.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from moopd.config import ConfigError, Scale, load_scale
from moopd.rl import rewards
from moopd.rl.advantages import EPSILON
from moopd.systems import OpdSignal, load_systems, training_order
from moopd.types import DATASETS

CONFIGS = Path(__file__).parent.parent / "configs"
SCALES = sorted(path.stem for path in (CONFIGS / "scale").glob("*.yaml"))


@pytest.fixture(scope="module")
def paper() -> Scale:
    return load_scale(CONFIGS / "scale" / "paper.yaml")


@pytest.mark.parametrize("name", SCALES)
def test_every_scale_loads(name: str) -> None:
    assert load_scale(CONFIGS / "scale" / f"{name}.yaml").name == name


def test_training_settings_of_section_b2(paper: Scale) -> None:
    training = paper.training
    assert paper.model.path == "Qwen/Qwen3-4B-Instruct-2507"
    assert (training.questions_per_step, training.group_size, training.num_candidates) == (32, 5, 5)
    assert (training.num_minibatches, training.lr) == (5, 1e-6)
    assert (training.beta, training.kl_coef, training.kl_placement) == (0.01, 1e-3, "before")
    assert (training.stage1_steps, training.stage2_steps) == (500, 500)
    assert (training.clip_ratio, training.dual_clip, training.entropy_coef) == (0.2, 3.0, 0.001)


def test_workflow_budgets_of_section_b2(paper: Scale) -> None:
    workflow = paper.workflow
    assert (workflow.cascade_steps, workflow.hierarchy_steps, workflow.leader_rounds) == (5, 12, 5)
    assert (workflow.max_input_tokens, workflow.max_output_tokens) == (8192, 512)
    assert (paper.retrieval.top_k, paper.retrieval.encoder.kind) == (3, "e5")


def test_evaluation_settings_of_sections_a_and_b2(paper: Scale) -> None:
    evaluation = paper.evaluation
    assert evaluation.attempts == 4
    assert (evaluation.sampling.temperature, evaluation.sampling.top_p) == (0.6, 0.95)
    assert (paper.statistics.num_draws, paper.statistics.confidence) == (4000, 0.95)
    assert paper.data.expected_rows["nq/train"] == 79_168
    assert paper.data.expected_rows["hotpotqa/train"] == 90_447
    assert (paper.data.clean, paper.data.overlap) == ("malformed", "drop_test")
    assert sum(paper.data.test_sizes.values()) == 5000
    assert set(paper.data.test_sizes) == set(DATASETS)


def test_reward_constants_of_sections_3_2_and_3_3() -> None:
    assert (rewards.OUTCOME_WEIGHT, rewards.BEHAVIOUR_WEIGHT) == (0.9, 0.1)
    assert (rewards.MAX_TOOL_STEPS, rewards.FORMAT_PENALTY, EPSILON) == (6, -1.0, 1e-6)


def test_rows_are_what_section_b1_says() -> None:
    systems = load_systems(CONFIGS / "systems.yaml")
    order = training_order(systems, tuple(systems))
    assert order[0] == "cmas_rl"
    hierarchy = [s for s in systems.values() if s.workflow == "hierarchy" and s.train]
    assert len(hierarchy) == 5
    assert all(s.train is not None and s.train.kl_teacher == "cmas_rl" for s in hierarchy)
    full = systems["multiagent_opd"].train
    assert full is not None and full.searcher == OpdSignal(kind="opd", teacher="cmas_rl")


def test_a_teacher_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "systems.yaml"
    path.write_text(
        "a: {title: a, workflow: cascade}\n"
        "b: {title: b, workflow: hierarchy, train: {searcher: {kind: opd, teacher: a}}}\n"
    )
    with pytest.raises(ValueError, match="teacher 'a', which is no trained system"):
        load_systems(path)


def test_an_unknown_key_is_named_with_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: x\ntraining: {lrr: 1}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'training\.lrr'; known here: .*\blr\b"):
        load_scale(path)
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        load_scale(CONFIGS / "scale" / "tiny.yaml", ["training.lr"])
    with pytest.raises(ConfigError, match="no scale 'nope'"):
        load_scale(CONFIGS / "scale" / "nope.yaml")
