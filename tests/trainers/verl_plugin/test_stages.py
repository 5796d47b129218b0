"""Stage I, freeze and Stage II through the real verl trainer on the CPU, at smoke size.

Needs verl's environment (`make verl-env`); a few minutes. Stage I loses all its processes once.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moopd.config import CriticConfig, Scale
from moopd.engines.local import LocalEngine
from moopd.engines.models import load_policy
from moopd.rl.rewards import FORMAT_PENALTY
from moopd.trainers.checkpoints import verify, weights_digest
from moopd.trainers.loop import TrainingResult
from moopd.trainers.verl_plugin.bridge import latest_step
from moopd.trainers.verl_plugin.journal import Log
from moopd.trainers.verl_plugin.launch import train_with_verl, verl_python
from moopd.trainers.verl_plugin.process import VerlError, descendants
from moopd.trainers.verl_plugin.rows import read_samples, read_workflows
from moopd.trainers.verl_plugin.validation import policy_folder
from moopd.types import CheckpointRef, ScoreRequest
from tests.rl.fake_judge import FakeJudge, user_text
from tests.support import team
from tests.trainers.verl_plugin import scene

ROOT = Path(__file__).parents[3]


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(scene.no_verl() is not None, reason=str(scene.no_verl())),
]


def test_in_verls_own_environment() -> None:
    """Contract, agent loop and equality with the torch trainer (tests in `inside`)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [str(verl_python()), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore",
         str(Path(__file__).parent / "inside")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    assert "skipped" not in found.stdout


@dataclass(frozen=True)
class StageOne:
    base: CheckpointRef
    url: str
    work: Path
    result: TrainingResult
    resumed: list[int]


@pytest.fixture(scope="module")
def stage_one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StageOne]:
    work = tmp_path_factory.mktemp("verl")
    base = scene.save_taught(work / "base", "base", 0)
    scale = scene.smoke_scale()
    task = scene.stage(scene.system("cmas_rl"), scale, num_steps=4).task
    folder = work / "cmas_rl"
    killed: list[int] = []
    resumed: list[int] = []

    def kill_at_two(step: int, metrics: dict[str, float]) -> None:
        killed.append(step)
        if step == 2:
            for process in descendants(str(folder)):
                process.kill()

    with scene.retrieval_server() as url:
        with pytest.raises(VerlError, match="exit code") as end:
            train_with_verl(scale, task, base, {}, url, folder, kill_at_two)
        assert killed == [0, 1, 2], end.value
        assert descendants(str(folder)) == []
        result = train_with_verl(
            scale, task, base, {}, url, folder, lambda step, _: resumed.append(step)
        )
        yield StageOne(base, url, folder, result, resumed)


def test_a_killed_stage_goes_on_where_it_was(stage_one: StageOne) -> None:
    assert stage_one.resumed[-2:] == [3, 4]
    assert 1 not in stage_one.resumed
    history = stage_one.result.history
    assert [entry["step"] for entry in history] == [0, 1, 2, 3, 4]
    assert all(entry["update/num_updates"] == 5 for entry in history[1:])
    assert {entry["step"] for entry in history if "dev/em" in entry} == {0, 2, 4}


def test_workflows_were_real_ones(stage_one: StageOne) -> None:
    steps = stage_one.result.history[1:]
    assert max(entry["train/searches"] for entry in steps) > 0
    assert max(entry["train/with_answer"] for entry in steps) > 0
    assert all(entry["credit/rollout_mismatch"] < 1e-4 for entry in steps)
    assert all(entry["training/rollout_actor_probs_pearson_corr"] > 0.9999 for entry in steps)


def test_the_frozen_policy_changed_and_acts_in_the_projects_engine(stage_one: StageOne) -> None:
    from moopd.workflows.rollout import Job, run_workflows

    last = stage_one.result.last
    assert last.sha256 != stage_one.base.sha256
    model, tokenizer = load_policy(str(verify(last)))
    jobs = [Job(question, 0, seed=n) for n, question in enumerate(scene.questions(3))]
    scale = scene.smoke_scale()
    trajectories = run_workflows(
        jobs,
        team("cascade", tokenizer, 1, scale.workflow),
        LocalEngine(model, tokenizer),
        scene.WordRetriever(),
    )
    assert any(t.num_searches for t in trajectories)


def test_a_finished_stage_is_not_run_again(stage_one: StageOne) -> None:
    scale = scene.smoke_scale()
    task = scene.stage(scene.system("cmas_rl"), scale, num_steps=4).task

    def unexpected(step: int, metrics: dict[str, float]) -> None:
        raise AssertionError(f"step {step} was run again")

    again = train_with_verl(
        scale, task, stage_one.base, {}, stage_one.url, stage_one.work, unexpected
    )
    assert (again.best, again.last) == (stage_one.result.best, stage_one.result.last)


def second_stage(
    stage_one: StageOne,
    name: str,
    work: Path,
    critic: CriticConfig | None = None,
    log: Log = lambda *_: None,
) -> TrainingResult:
    """Two steps of row `name` from the base, with what they trained on kept under `work`."""
    scale = smoke_scale_with_rows()
    if critic is not None:
        scale = scale.model_copy(update={"critic": critic})
    task = scene.stage(scene.system(name), scale, num_steps=2).task
    teachers = {"cmas_rl": stage_one.result.best}
    return train_with_verl(scale, task, stage_one.base, teachers, stage_one.url, work, log)


def smoke_scale_with_rows() -> Scale:
    scale = scene.smoke_scale()
    return scale.model_copy(update={"verl": scale.verl.model_copy(update={"keep_rows": True})})


@pytest.mark.parametrize("name", ["multiagent_opd", "opd_base_teacher"])
def test_stage_two_learns_from_the_frozen_teacher(
    stage_one: StageOne, name: str, tmp_path: Path
) -> None:
    first = second_stage(stage_one, name, tmp_path).history[1]
    assert first["update/num_updates"] == 5
    assert first["train/with_subtasks"] > 0
    assert "credit/leader_reward" in first
    _check_rows(tmp_path, stage_one)
    if name == "opd_base_teacher":
        # The student starts as the base: its own log-probabilities are the teacher's.
        assert first["credit/teacher_log_ratio"] == pytest.approx(0.0, abs=1e-5)
    else:
        assert abs(first["credit/teacher_log_ratio"]) > 1e-5


def _check_rows(work: Path, stage_one: StageOne) -> None:
    """Old log-probabilities of verl's first step are those of the project's engine."""
    samples = read_samples(work, 1)
    model, tokenizer = load_policy(str(verify(stage_one.base)))
    engine = LocalEngine(model, tokenizer)
    scores = engine.score([ScoreRequest(s.prompt_ids, s.token_ids) for s in samples])
    for sample, score in zip(samples, scores, strict=True):
        assert sample.old_logprobs == pytest.approx(score, abs=1e-4)


VERDICTS = ("<score> 1 </score>", "<score> 0 </score>", "cannot say")
SCORES = (1.0, 0.0, None)


class JudgeOfItsOwn:
    """What the fake endpoint says: one of VERDICTS, the same whenever it is shown the same.

    With `until` it is gone from the moment at which a checkpoint lies in that folder.
    """

    def __init__(self, until: Path | None = None) -> None:
        self.until = until
        self.given: list[tuple[float, int]] = []
        """(temperature, number of the verdict)"""
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, _: int, body: dict[str, Any]) -> str | tuple[int, bytes]:
        if self.until is not None and latest_step(self.until):
            return 503, b"the judge is gone"
        with self._lock:
            verdict = self._seen.setdefault(user_text(body), len(self._seen)) % len(VERDICTS)
            self.given.append((body["temperature"], verdict))
        return VERDICTS[verdict]


def test_prompted_critic_is_rewarded_by_its_endpoint_which_dies_in_the_middle(
    stage_one: StageOne, tmp_path: Path
) -> None:
    def critic(judge: FakeJudge) -> CriticConfig:
        return CriticConfig(kind="http", url=judge.url, max_retries=1, max_tries=2)

    first, second = JudgeOfItsOwn(until=tmp_path), JudgeOfItsOwn()
    cause = r"(?s)JudgeError.*status 503: the judge is gone.*start the stage again"
    with FakeJudge(first) as judge, pytest.raises(VerlError, match=cause):
        second_stage(stage_one, "prompted_critic", tmp_path, critic(judge))
    assert latest_step(tmp_path) == 1
    kept = weights_digest(policy_folder(tmp_path, 1))
    steps: list[int] = []

    def log(step: int, _: dict[str, float]) -> None:
        steps.append(step)
        assert weights_digest(policy_folder(tmp_path, 1)) == kept

    with FakeJudge(second) as judge:
        result = second_stage(stage_one, "prompted_critic", tmp_path, critic(judge), log)
    assert steps == [2]
    for step, said in ((1, first.given), (2, second.given)):
        workflows = read_workflows(tmp_path, step)
        _check_verdicts(workflows, said)
        _check_critic_rewards(workflows, result.history[step])


def _check_verdicts(workflows: list[dict[str, Any]], said: list[tuple[float, int]]) -> None:
    """Each report has the verdict that its judge gave; a malformed one was asked for again."""
    asked = Counter(verdict for temperature, verdict in said if not temperature)
    again = [verdict for temperature, verdict in said if temperature]
    assert min(asked[verdict] for verdict in range(len(VERDICTS))) > 0
    assert again == [2] * asked[2]
    got = Counter(SCORES.index(score) for w in workflows for _, score in w["verdicts"])
    assert got == asked


def _check_critic_rewards(workflows: list[dict[str, Any]], entry: dict[str, float]) -> None:
    assert entry["update/num_updates"] == 5
    assert "credit/searcher_reward" not in entry
    rewards = [r for w in workflows for r in w["credit"]["subtasks"] if r is not None]
    assert 1.0 in rewards
    assert entry["credit/critic_reward"] == pytest.approx(sum(rewards) / len(rewards))
    for workflow in workflows:
        for subtask, score in workflow["verdicts"]:
            # A Searcher that was malformed on its way is penalised whatever it reported.
            assert workflow["credit"]["subtasks"][subtask] in (score, FORMAT_PENALTY)
