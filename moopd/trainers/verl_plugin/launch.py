"""Runs one training stage on verl: writes its inputs, watches the process, freezes the result.

A stage that was cut is started again with the same arguments: it goes on from verl's last complete
checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from moopd.config import JUDGE_PLACE, ConfigError, Scale
from moopd.retrieval.base import Retriever, ScoredRetriever
from moopd.rl.critic import require_judge
from moopd.rl.samples import needs_judge
from moopd.trainers.checkpoints import verify, weights_digest
from moopd.trainers.loop import TrainingResult, TrainingTask
from moopd.trainers.verl_plugin.bridge import (
    drop_other_steps,
    freeze_step,
    latest_step,
    start_folder,
    world_size,
)
from moopd.trainers.verl_plugin.journal import Log, MetricsTail, history, next_metrics_file
from moopd.trainers.verl_plugin.overrides import StartPoint, check_supported, verl_overrides
from moopd.trainers.verl_plugin.process import VerlError, log_end, only_launcher, run_to_end
from moopd.trainers.verl_plugin.questions import write_question_files
from moopd.trainers.verl_plugin.serving import served
from moopd.trainers.verl_plugin.spec import (
    LOADED_FOLDER,
    PLUGIN_MODULE,
    RUN_FILE,
    VerlRun,
    load_run,
)
from moopd.trainers.verl_plugin.validation import (
    CHECKPOINTS,
    best_folder,
    best_step,
    validations,
)
from moopd.types import CheckpointRef

PYTHON_VARIABLE = "MOOPD_VERL_PYTHON"
_RESULT = "result.json"
_LOG = "verl.log"
_STARTS = 3
_SLOW_RAY = "The current node timed out during startup"


def train_stage(
    scale: Scale,
    task: TrainingTask,
    base: CheckpointRef,
    teachers: Mapping[str, CheckpointRef],
    retriever: Retriever,
    work: Path,
    log: Log,
) -> TrainingResult:
    """`train_with_verl` with the scale's retriever: a remote one by its URL, else served here."""
    if scale.retrieval.kind == "remote":
        url = scale.retrieval.url or ""
        return train_with_verl(scale, task, base, teachers, url, work, log)
    with served(cast(ScoredRetriever, retriever), task.top_k) as url:
        return train_with_verl(scale, task, base, teachers, url, work, log)


def train_with_verl(
    scale: Scale,
    task: TrainingTask,
    base: CheckpointRef,
    teachers: Mapping[str, CheckpointRef],
    retrieval_url: str,
    work: Path,
    log: Log,
    mlflow_run_id: str | None = None,
) -> TrainingResult:
    """Run or resume a stage under `work`; the same result as the torch trainer's loop.

    `log` gets every step's metrics while verl runs. With `mlflow_run_id`, verl also writes into
    that run itself (its environment needs mlflow and MLFLOW_TRACKING_URI).
    """
    work = work.resolve()
    with only_launcher(work):
        done = _read_result(work)
        if done is not None:
            return done
        run = make_run(scale, task, base, teachers, retrieval_url, work)
        _refuse_other_run(work, run)
        start = _start_point(scale, run)
        if start is not None:
            _require_what_it_needs(scale, run, start)
            run.write()
            launch_stage(scale, task, run, start, start_folder(base), log, mlflow_run_id)
        return _finish(run)


def make_run(
    scale: Scale,
    task: TrainingTask,
    base: CheckpointRef,
    teachers: Mapping[str, CheckpointRef],
    retrieval_url: str,
    work: Path,
) -> VerlRun:
    """The run file; every teacher is verified by digest and vocabulary here."""
    named = {"base": base, **teachers}
    return VerlRun(
        system=task.system,
        seed=task.seed,
        num_steps=task.num_steps,
        work=str(work),
        training=task.training,
        workflow=task.workflow,
        evaluation_sampling=task.evaluation.sampling,
        critic=scale.critic,
        prompt_style=scale.model.prompt_style,
        top_k=task.top_k,
        retrieval_url=retrieval_url,
        max_retrieval_error_share=task.max_retrieval_error_share,
        teachers={
            name: start_folder(named[name], student=base)
            for name in task.row.teachers
            if name in named
        },
        call_timeout_s=scale.verl.call_timeout_s,
        keep_rows=scale.verl.keep_rows,
    )


def verl_python() -> Path:
    """Interpreter of verl's environment. Raises ConfigError when there is none."""
    default = Path(__file__).parents[3] / ".venv-verl" / "bin" / "python"
    path = Path(os.environ.get(PYTHON_VARIABLE, default))
    if not path.is_file():
        raise ConfigError(
            f"{path}: got no interpreter, expected verl's environment; build it with "
            f"`make verl-env` or point {PYTHON_VARIABLE} at its python"
        )
    return path


def verl_environment(scale: Scale, metrics: Path) -> dict[str, str]:
    """Environment of the subprocess: this one, with the plug-in named and the hub cut off."""
    root = str(Path(__file__).parents[3])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH")) if part)
    settings = {
        "PYTHONPATH": path,
        "VERL_USE_EXTERNAL_MODULES": PLUGIN_MODULE,
        "VERL_USE_EXTERNAL_PLUGINS": "none",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VERL_LOGGING_LEVEL": "INFO",
        "RAY_DISABLE_METRICS_COLLECTION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if scale.verl.device == "cpu":
        settings |= {
            "VERL_PLATFORM": "cpu",
            "OMP_NUM_THREADS": "1",
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            # Ray's 15 leaves its workers next to nothing on cores that are shared.
            "RAY_worker_niceness": "0",
        }
    kept = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "MLFLOW_RUN_ID")}
    return {**kept, **settings}


def _start_point(scale: Scale, run: VerlRun) -> StartPoint | None:
    """None where every step is trained and validated already."""
    step = latest_step(run.folder)
    if step:
        got, wanted = world_size(run.folder, step), scale.verl.gpus
        if got != wanted:
            raise ConfigError(
                f"the checkpoint of step {step} was written by {got} training processes, "
                f"verl.gpus is {wanted}; verl can only resume with the same number"
            )
    due = step % run.training.validate_every == 0 or step == run.num_steps
    validated = not due or any(entry["step"] == step for entry in validations(run.folder))
    if step == run.num_steps and validated:
        return None
    return StartPoint(step, run.num_steps, validated)


def _require_what_it_needs(scale: Scale, run: VerlRun, start: StartPoint) -> None:
    """Raises before verl starts: a judge that is gone would be met minutes later."""
    check_supported(scale, run)
    if needs_judge(run.row) and not start.only_validate:
        require_judge(run.critic)


def launch_stage(
    scale: Scale,
    task: TrainingTask,
    run: VerlRun,
    start: StartPoint,
    student: str,
    log: Log,
    mlflow_run_id: str | None = None,
) -> None:
    """One process of verl from `start` to its end; VerlError where it fails or was not ours."""
    work = run.folder
    write_question_files(
        work,
        task.train_questions,
        task.dev_questions[: task.training.validation_questions],
        task.num_steps,
        task.training.questions_per_step,
        task.seed,
    )
    overrides = verl_overrides(scale, run, student, start)
    metrics = next_metrics_file(work)
    env = verl_environment(scale, metrics)
    if mlflow_run_id is not None:
        env["MLFLOW_RUN_ID"] = mlflow_run_id
        overrides.append("trainer.logger=[console,file,mlflow]")
    drop_other_steps(work, start.step)
    command = [str(verl_python()), "-m", "verl.trainer.main_ppo", *overrides]
    print(f"verl: step {start.step} of {run.num_steps}, log {work / _LOG}", file=sys.stderr)
    deadline_s = scale.verl.deadline_hours * 3600
    poll = MetricsTail(metrics, log).poll
    _started(work, lambda: run_to_end(command, env, work, work / _LOG, deadline_s, poll))
    _check_proofs(run)


def _started(work: Path, run_once: Callable[[], None]) -> None:
    """`run_once`, again where Ray was too slow to start: on a busy host it gives up after 30 s."""
    for attempt in range(1, _STARTS + 1):
        shutil.rmtree(work / LOADED_FOLDER, ignore_errors=True)
        try:
            return run_once()
        except VerlError as error:
            if (work / LOADED_FOLDER / "trainer.json").is_file():
                raise
            if _SLOW_RAY not in str(error) or attempt == _STARTS:
                raise VerlError(f"verl ended before it loaded the plug-in: {error}") from None
            print(f"verl: Ray did not start in time, start {attempt + 1}", file=sys.stderr)


def _check_proofs(run: VerlRun) -> None:
    """A run that did not use our code must not count as one."""
    wanted = ["trainer", "worker_0", "agent_loop", *(f"teacher_{n}" for n in run.row.teachers)]
    folder = run.folder / LOADED_FOLDER
    missing = [name for name in wanted if not (folder / f"{name}.json").is_file()]
    if missing:
        raise VerlError(
            f"verl ended without an error, but nothing shows that the plug-in's {missing} ran; "
            f"expected VERL_USE_EXTERNAL_MODULES={PLUGIN_MODULE} to be honoured. "
            f"{log_end(run.folder / _LOG)}"
        )


def _refuse_other_run(work: Path, run: VerlRun) -> None:
    path = work / RUN_FILE
    if not path.is_file():
        return
    before, now = (_what_it_is(one) for one in (load_run(path), run))
    changed = [name for name, value in now.items() if before[name] != value]
    if changed:
        raise ConfigError(
            f"{work} holds a run with other {', '.join(changed)}; use another folder or remove it"
        )


def _what_it_is(run: VerlRun) -> dict[str, Any]:
    """A run without what may change between attempts: a server may have moved to another port."""
    places = {"retrieval_url": True, "call_timeout_s": True, "keep_rows": True}
    return run.model_dump(exclude={**places, "critic": set(JUDGE_PLACE)})


def _finish(run: VerlRun) -> TrainingResult:
    work, name = run.folder, run.system.name
    best = best_step(work)
    if best is None:
        raise VerlError(f"no validated step under {work}, expected at least the last one")
    last = freeze_step(work, name, run.num_steps, f"last_{run.num_steps:06d}")
    best_ref = last
    if best != run.num_steps:
        folder = best_folder(work, best)
        best_ref = CheckpointRef(name, best, str(folder), weights_digest(folder))
    result = TrainingResult(best=best_ref, last=last, history=history(work))
    content = {"best": asdict(result.best), "last": asdict(result.last)}
    temporary = work / f".{_RESULT}.tmp"
    temporary.write_text(json.dumps(content, sort_keys=True))
    os.replace(temporary, work / _RESULT)
    # Shards and optimizer state are several times the size of the policy and no longer needed.
    shutil.rmtree(work / CHECKPOINTS)
    return result


def _read_result(work: Path) -> TrainingResult | None:
    path = work / _RESULT
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    best, last = (CheckpointRef(**content[which]) for which in ("best", "last"))
    verify(best)
    verify(last)
    return TrainingResult(best=best, last=last, history=history(work))
