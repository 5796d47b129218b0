"""When verl is started: not where its judge is gone, and again where Ray was too slow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moopd.config import CriticConfig, Scale
from moopd.rl.critic import JudgeError
from moopd.trainers.verl_plugin import launch
from moopd.trainers.verl_plugin.overrides import StartPoint
from moopd.trainers.verl_plugin.process import VerlError
from moopd.trainers.verl_plugin.spec import VerlRun
from tests.rl.fake_judge import FakeJudge
from tests.trainers.verl_plugin import scene
from tests.trainers.verl_plugin.test_rows_and_credit import run_of


class Launched(Exception):
    """verl would have been started from this step."""


def start_critic_stage(scale: Scale, work: Path, judge_url: str) -> None:
    """The Prompted Critic stage up to the moment at which verl is started."""
    base = scene.save_tiny(work.parent / "base", "base", 0)
    critic = CriticConfig(kind="http", url=judge_url)
    task = scene.stage(scene.system("prompted_critic"), scale, num_steps=2).task
    launch.train_with_verl(
        scale.model_copy(update={"critic": critic}), task, base, {"cmas_rl": base},
        "http://127.0.0.1:1", work, lambda *_: None,
    )  # fmt: skip


def test_a_dead_judge_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(scale: Scale, task: Any, run: VerlRun, start: StartPoint, *_: Any) -> None:
        raise Launched(start.step)

    monkeypatch.setattr(launch, "launch_stage", launched)
    scale, work = scene.smoke_scale(), tmp_path / "stage"
    with FakeJudge(lambda *_: "") as judge, pytest.raises(Launched, match="0"):
        start_critic_stage(scale, work, judge.url)
    (work / "run.json").unlink()
    with pytest.raises(JudgeError, match=f"{judge.url}/v1/models does not answer.*start it"):
        start_critic_stage(scale, work, judge.url)
    assert [path.name for path in work.iterdir()] == [".lock"]


def test_a_judge_is_not_asked_for_where_only_a_validation_is_left() -> None:
    run = run_of("prompted_critic").model_copy(
        update={"critic": CriticConfig(kind="http", url="http://127.0.0.1:9")}
    )
    launch._require_what_it_needs(scene.smoke_scale(), run, StartPoint(2, 2, validated=False))
    with pytest.raises(JudgeError, match="does not answer"):
        launch._require_what_it_needs(scene.smoke_scale(), run, StartPoint(1, 2, validated=True))


@pytest.mark.parametrize(
    ("cause", "loaded", "starts", "message"),
    [
        ("The current node timed out during startup. This", False, 3, "before it loaded"),
        ("The current node timed out during startup. This", True, 1, "^exit code 1. The"),
        ("out of memory", False, 1, "before it loaded the plug-in: exit code 1. out of"),
    ],
)
def test_only_a_slow_start_of_ray_is_tried_again(
    tmp_path: Path, cause: str, loaded: bool, starts: int, message: str
) -> None:
    seen: list[int] = []

    def fail() -> None:
        seen.append(1)
        if loaded:
            run_of("cmas_rl").model_copy(update={"work": str(tmp_path)}).leave_proof("trainer", {})
        raise VerlError(f"exit code 1. {cause}")

    with pytest.raises(VerlError, match=message):
        launch._started(tmp_path, fail)
    assert len(seen) == starts


def test_a_start_that_ray_makes_at_last_counts(tmp_path: Path) -> None:
    seen: list[int] = []

    def second_time() -> None:
        seen.append(1)
        if len(seen) == 1:
            raise VerlError(launch._SLOW_RAY)

    launch._started(tmp_path, second_time)
    assert len(seen) == 2


def test_tests_that_need_verl_fail_where_the_interpreter_named_for_them_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(launch.PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "a" / "b" / "c" / "launch.py"))
    assert "make verl-env" in str(scene.no_verl())
    monkeypatch.setenv(launch.PYTHON_VARIABLE, str(tmp_path / "python"))
    assert scene.no_verl() is None
