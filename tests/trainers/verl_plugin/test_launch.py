"""Everything around the verl process that needs no verl: config, files, process, checkpoints."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moopd.config import ConfigError, load_scale
from moopd.trainers.checkpoints import CheckpointError
from moopd.trainers.loop import questions_of_step
from moopd.trainers.verl_plugin import bridge, launch
from moopd.trainers.verl_plugin.journal import MetricsTail, history, next_metrics_file
from moopd.trainers.verl_plugin.overrides import StartPoint, verl_overrides
from moopd.trainers.verl_plugin.process import (
    MARKER,
    VerlError,
    descendants,
    only_launcher,
    run_to_end,
)
from moopd.trainers.verl_plugin.questions import TRAIN_FILE, write_question_files
from moopd.trainers.verl_plugin.spec import VerlRun, load_run
from moopd.trainers.verl_plugin.validation import (
    best_folder,
    best_step,
    policy_folder,
    record_validation,
    validations,
)
from tests.trainers.verl_plugin import scene
from tests.trainers.verl_plugin.test_rows_and_credit import run_of

PAPER = scene.SYSTEMS.parent / "scale" / "paper.yaml"


def overrides_of(name: str, scale: Any, run: VerlRun | None = None) -> dict[str, str]:
    listed = verl_overrides(scale, run or run_of(name), "/base", StartPoint(0, 2, validated=False))
    return dict(item.split("=", 1) for item in listed)


def test_every_number_of_the_config_reaches_verl() -> None:
    scale = load_scale(PAPER)
    run = run_of("multiagent_opd").model_copy(
        update={"training": scale.training, "workflow": scale.workflow, "num_steps": 500}
    )
    found = overrides_of("multiagent_opd", scale, run)
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    expected = {
        "data.train_batch_size": "32",
        f"{rollout}.n": "5",
        f"{actor}.optim.lr": "1e-06",
        f"{actor}.ppo_epochs": "1",
        f"{actor}.use_dynamic_bsz": "True",
        f"{actor}.clip_ratio_low": "0.2",
        f"{actor}.clip_ratio_high": "0.2",
        f"{actor}.clip_ratio_c": "3.0",
        f"{actor}.entropy_coeff": "0.001",
        "actor_rollout_ref.model.use_remove_padding": "True",
        "actor_rollout_ref.model.use_fused_kernels": "True",
        "actor_rollout_ref.model.fused_kernel_options.impl_backend": "torch",
        f"{actor}.use_kl_loss": "False",
        "data.max_prompt_length": "8192",
        "data.max_response_length": "512",
        f"{rollout}.max_model_len": "8705",
        f"+{rollout}.engine_kwargs.sglang.context_length": "8705",
        "algorithm.use_kl_in_reward": "True",
        "algorithm.rollout_correction.rollout_is": "token",
        "algorithm.rollout_correction.bypass_mode": "False",
        "trainer.total_training_steps": "500",
        "trainer.n_gpus_per_node": "8",
        "trainer.resume_mode": "auto",
    }
    assert {key: found[key] for key in expected} == expected


def test_stage_one_starts_no_reference_model() -> None:
    assert overrides_of("cmas_rl", scene.smoke_scale())["algorithm.use_kl_in_reward"] == "False"


@pytest.mark.parametrize(
    ("name", "training", "message"),
    [
        ("cmas_rl", {"validate_every": 3, "checkpoint_every": 2}, "multiple of checkpoint_every"),
        ("prompted_critic", {}, "critic.kind is base_model, expected http"),
    ],
)
def test_what_verl_cannot_do_is_refused(name: str, training: Any, message: str) -> None:
    scale = scene.smoke_scale(**training)
    with pytest.raises(ConfigError, match=message):
        overrides_of(name, scale, run_of(name, **training))


def test_question_file_holds_the_torch_trainers_order(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    questions = scene.questions(7)
    write_question_files(tmp_path, questions, questions[:2], num_steps=3, per_step=3, seed=5)
    rows = pq.read_table(tmp_path / TRAIN_FILE).to_pylist()
    assert len(rows) == 9
    for step in (1, 2, 3):
        expected = [q.id for q in questions_of_step(questions, 3, step, 5)]
        block = [row["extra_info"] for row in rows[3 * step - 3 : 3 * step]]
        assert [json.loads(info["question"])["id"] for info in block] == expected
        assert [info["number"] for info in block] == [0, 1, 2]


def test_run_file_comes_back(tmp_path: Path) -> None:
    run = run_of("opd_base_teacher").model_copy(update={"work": str(tmp_path)})
    assert load_run(run.write()) == run
    with pytest.raises(ConfigError, match="no readable run file"):
        load_run(tmp_path / "other.json")


def save_policy_files(work: Path, step: int, text: str = "w") -> None:
    folder = policy_folder(work, step)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(f"{text}{step}")
    (folder / "config.json").write_text("{}")


def test_best_is_the_highest_score_and_the_earlier_of_equals(tmp_path: Path) -> None:
    record_validation(tmp_path, 0, {"dev/em": 0.9})
    for step, score in ((2, 0.3), (4, 0.5), (6, 0.5), (8, 0.1)):
        save_policy_files(tmp_path, step)
        record_validation(tmp_path, step, {"dev/em": score})
    assert best_step(tmp_path) == 4
    assert [path.name for path in tmp_path.glob("best_*")] == ["best_000004"]
    assert (best_folder(tmp_path, 4) / "model.safetensors").read_text() == "w4"


def test_best_policy_outlives_verls_rotation(tmp_path: Path) -> None:
    import shutil

    save_policy_files(tmp_path, 2)
    record_validation(tmp_path, 2, {"dev/em": 0.3})
    shutil.rmtree(tmp_path / "checkpoints")
    assert (best_folder(tmp_path, 2) / "model.safetensors").read_text() == "w2"


def test_a_validation_line_cut_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    record_validation(tmp_path, 0, {"dev/em": 0.1})
    with (tmp_path / "validation.jsonl").open("a") as journal:
        journal.write('{"step": 2, "dev')
    assert [entry["step"] for entry in validations(tmp_path)] == [0]


def test_metrics_are_followed_and_a_repeated_step_counts_once(tmp_path: Path) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    first = next_metrics_file(tmp_path)
    tail = MetricsTail(first, lambda step, metrics: seen.append((step, metrics)))
    tail.poll()
    first.write_text('{"step": 1, "data": {"a": 1.0, "b": "text"}}\n{"step": 2, "da')
    tail.poll()
    assert seen == [(1, {"a": 1.0})]
    with first.open("a") as stream:
        stream.write('ta": {"a": 2.0}}\n')
    tail.poll()
    assert seen[1:] == [(2, {"a": 2.0})]
    second = next_metrics_file(tmp_path)
    assert second != first
    second.write_text('{"step": 2, "data": {"a": 5}}\n')
    assert history(tmp_path) == ({"step": 1, "a": 1.0}, {"step": 2, "a": 5.0})


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_failing_process_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match=r"exit code 3.*\n.*out of memory"):
        run_to_end(
            python("print('out of memory', flush=True); raise SystemExit(3)"),
            dict(os.environ), tmp_path, tmp_path / "log", 30, lambda: None, 0.05,
        )  # fmt: skip


def test_the_deadline_ends_the_process_and_all_its_descendants(tmp_path: Path) -> None:
    # The grandchild leaves the group, as Ray's processes do.
    code = (
        "import subprocess, sys, time;"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True); time.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(VerlError, match="passed its deadline"):
        run_to_end(
            python(code), dict(os.environ), tmp_path, tmp_path / "log", 1.5, lambda: None, 0.05
        )
    assert time.monotonic() - began < 20
    assert descendants(str(tmp_path)) == []


def test_an_interrupted_caller_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt() -> None:
        if descendants(str(tmp_path)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_end(
            python("import time; time.sleep(60)"),
            dict(os.environ), tmp_path, tmp_path / "log", 60, interrupt, 0.05,
        )  # fmt: skip
    assert descendants(str(tmp_path)) == []


def test_descendants_are_found_by_their_marker(tmp_path: Path) -> None:
    import subprocess

    process = subprocess.Popen(
        python("import time; time.sleep(60)"), env={**os.environ, MARKER: str(tmp_path)}
    )
    try:
        time.sleep(0.2)
        assert [found.pid for found in descendants(str(tmp_path))] == [process.pid]
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_one_launcher_a_folder_and_orphans_are_ended(tmp_path: Path) -> None:
    import subprocess

    orphan = subprocess.Popen(
        python("import time; time.sleep(60)"), env={**os.environ, MARKER: str(tmp_path)}
    )
    time.sleep(0.2)
    with only_launcher(tmp_path):
        assert orphan.wait(10) == -signal.SIGKILL
        with pytest.raises(VerlError, match="another process"), only_launcher(tmp_path):
            pass
    with only_launcher(tmp_path):
        pass


def test_bridge_freezes_a_step_with_a_digest(tmp_path: Path) -> None:
    save_policy_files(tmp_path, 5)
    checkpoint = bridge.freeze_step(tmp_path, "cmas_rl", 5, "last_000005")
    assert bridge.start_folder(checkpoint) == str(tmp_path / "last_000005")
    (tmp_path / "last_000005" / "model.safetensors").unlink()
    (tmp_path / "last_000005" / "model.safetensors").write_text("tampered")
    with pytest.raises(CheckpointError, match="got digest"):
        bridge.start_folder(checkpoint)


def test_bridge_says_what_a_checkpoint_lacks(tmp_path: Path) -> None:
    policy_folder(tmp_path, 5).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="expected hf_model"):
        bridge.freeze_step(tmp_path, "cmas_rl", 5, "last")
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("five")
    with pytest.raises(CheckpointError, match="expected a step number"):
        bridge.latest_step(tmp_path)


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    student = scene.save_tiny(tmp_path / "student", "base", 0)
    teacher = scene.save_tiny(tmp_path / "teacher", "cmas_rl", 1)
    bridge.start_folder(teacher, student)
    path = tmp_path / "teacher" / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"token ids of .* differ"):
        bridge.start_folder(teacher, student)


def test_resuming_with_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    run = run_of("cmas_rl").model_copy(update={"work": str(tmp_path)})
    actor = policy_folder(tmp_path, 1).parent
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
    with pytest.raises(ConfigError, match=r"written by 4 .*verl\.gpus is 1"):
        launch._start_point(scene.smoke_scale(), run)


def test_start_point_validates_what_a_kill_left_unvalidated(tmp_path: Path) -> None:
    run = run_of("cmas_rl").model_copy(update={"work": str(tmp_path), "num_steps": 4})
    scale = scene.smoke_scale()
    fresh = launch._start_point(scale, run)
    assert fresh is not None and fresh.validate_first and not fresh.only_validate
    actor = policy_folder(tmp_path, 4).parent
    actor.mkdir(parents=True)
    (actor / "fsdp_config.json").write_text('{"world_size": 1}')
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    cut = launch._start_point(scale, run)
    assert cut is not None and cut.validate_first and cut.only_validate
    save_policy_files(tmp_path, 3)
    (policy_folder(tmp_path, 4)).mkdir()
    (policy_folder(tmp_path, 4) / "model.safetensors").write_text("w")
    record_validation(tmp_path, 4, {"dev/em": 0.2})
    assert launch._start_point(scale, run) is None


def test_another_runs_folder_is_refused(tmp_path: Path) -> None:
    run = run_of("cmas_rl").model_copy(update={"work": str(tmp_path)})
    run.write()
    critic = run.critic.model_copy(update={"url": "http://127.0.0.1:3", "max_tries": 2})
    moved = run.model_copy(update={"retrieval_url": "http://127.0.0.1:2", "critic": critic})
    launch._refuse_other_run(tmp_path, moved)
    judged_by = run.critic.model_copy(update={"model": "another"})
    with pytest.raises(ConfigError, match="other critic"):
        launch._refuse_other_run(tmp_path, run.model_copy(update={"critic": judged_by}))
    with pytest.raises(ConfigError, match="other seed"):
        launch._refuse_other_run(tmp_path, run.model_copy(update={"seed": 2}))


def test_a_run_without_proof_of_the_plugin_does_not_count(tmp_path: Path) -> None:
    run = run_of("multiagent_opd").model_copy(update={"work": str(tmp_path)})
    (tmp_path / "verl.log").write_text("trained something else\n")
    run.leave_proof("trainer", {})
    with pytest.raises(VerlError, match=r"worker_0.*agent_loop.*teacher_cmas_rl"):
        launch._check_proofs(run)


def test_a_missing_environment_names_the_command_that_builds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(launch.PYTHON_VARIABLE, "/nowhere/python")
    with pytest.raises(ConfigError, match="make verl-env"):
        launch.verl_python()
