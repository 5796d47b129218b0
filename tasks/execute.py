"""Runs one stage as a Prefect task: cached by our key, verified, retried, cut at its deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prefect import task
from prefect.context import TaskRunContext

from moopd.config import ConfigError, Scale
from moopd.systems import System
from moopd.tracking.journal import Journal
from moopd.types import ArtifactRef
from tasks import artifacts
from tasks.home import ROOT, Home, stage_folder
from tasks.keys import facets, key_of
from tasks.stages import Stage
from tasks.worker import EXIT_CONFIG, Request, write_request


class StageError(RuntimeError):
    """A stage failed; the message is the worker's own."""


class MissingInput(RuntimeError):
    """Stages that were not asked for and have no artifact."""

    def __init__(self, missing: list[str]) -> None:
        super().__init__(f"missing upstream: {', '.join(missing)}")
        self.missing = missing


@dataclass
class Run:
    """What all stages of one pipeline run share."""

    id: str
    home: Home
    scale: Scale
    systems: dict[str, System]
    journal: Journal
    children: set[int] = field(default_factory=set)
    """Process groups of workers under way; a signal handler ends them."""

    def end_children(self) -> None:
        for group in list(self.children):
            _kill_group(group)


# The run is looked up by id, so that Prefect sees (and stores) small JSON parameters only.
_RUNS: dict[str, Run] = {}


def register(run: Run) -> None:
    _RUNS[run.id] = run


def _worth_retrying(_task: object, _run: object, state: Any) -> bool:
    """Bad configuration does not get better by trying again."""
    try:
        state.result(raise_on_failure=True)
    except (ConfigError, MissingInput):
        return False
    except Exception:
        return True
    return False


def _cache_key(_context: TaskRunContext, parameters: dict[str, Any]) -> str:
    return str(parameters["key"])


@task(
    task_run_name="{name}",
    cache_key_fn=_cache_key,
    persist_result=True,
    result_serializer="json",
    retries=1,
    retry_delay_seconds=[2.0],
    retry_jitter_factor=0.5,
    retry_condition_fn=_worth_retrying,
)
def run_stage(name: str, key: str, run_id: str, stage: Any, inputs: Any) -> dict[str, str]:
    """Compute a stage's artifact, or wait for whoever computes the same key and take theirs."""
    run = _RUNS[run_id]
    with artifacts.locked(run.home, key):
        done = artifacts.find(run.home, name, key)
        if done is not None:
            return asdict(done.ref)
        return asdict(_compute(run, stage, key, inputs))


def stage_result(
    run: Run, stage: Stage, inputs: Mapping[str, ArtifactRef], *, force: bool = False
) -> Any:
    """Submit a stage; the future's result is a verified artifact reference (as a dict)."""
    given = {name: inputs[name] for name in stage.needs}
    key = key_of(facets(stage, given))
    if force:
        artifacts.quarantine(run.home, artifacts.final_path(run.home, stage.name, key))
    hit = artifacts.find(run.home, stage.name, key)
    if hit is None:
        artifacts.quarantine(run.home, artifacts.final_path(run.home, stage.name, key))
    else:
        run.journal.write(
            "stage_cached", stage=stage.name, key=key, sha256=hit.ref.sha256, origin=hit.run
        )
    # Prefect's own result may outlive a removed artifact: what is not there is computed anew.
    chosen = run_stage.with_options(refresh_cache=hit is None)
    return chosen.submit(name=stage.name, key=key, run_id=run.id, stage=stage, inputs=given)


def _compute(run: Run, stage: Stage, key: str, inputs: Mapping[str, ArtifactRef]) -> ArtifactRef:
    temporary = artifacts.temporary_path(run.home, stage.name, key)
    work = run.home.work / stage_folder(stage.name) / key[:16]
    work.mkdir(parents=True, exist_ok=True)
    attempt = f"{stage_folder(stage.name)}-{time.time_ns()}"
    run.journal.write("stage_started", stage=stage.name, key=key, attempt=attempt, pid=os.getpid())
    started = time.monotonic()
    try:
        _run_worker(run, _request(run, stage, inputs, temporary, work, attempt), stage.deadline_s)
    except BaseException as error:
        run.journal.write(
            "stage_failed", stage=stage.name, attempt=attempt, error=str(error)[:2000],
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip
        raise
    seconds = time.monotonic() - started
    ref = artifacts.finish(
        temporary, run.home, stage.name, key, facets(stage, inputs), seconds, run.id
    )
    run.journal.write(
        "stage_finished", stage=stage.name, attempt=attempt, key=key, sha256=ref.sha256,
        path=ref.path, seconds=round(seconds, 3),
    )  # fmt: skip
    return ref


def _request(
    run: Run, stage: Stage, inputs: Mapping[str, ArtifactRef], out: Path, work: Path, attempt: str
) -> Request:
    return Request(
        stage=stage.name,
        kind=stage.kind,
        scale=run.scale,
        system=stage.system,
        systems=run.systems,
        row=stage.row,
        checkpoint=stage.checkpoint,
        run=stage.run,
        seed=stage.seed,
        inputs=dict(inputs),
        teachers=stage.teachers,
        out=out,
        work=work,
        home=run.home.root,
        journal_run=run.id,
        attempt=attempt,
    )


def _run_worker(run: Run, request: Request, deadline_s: float) -> None:
    path = request.work / "request.json"
    write_request(path, request)
    error_file = path.with_suffix(".error")
    error_file.unlink(missing_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.worker", str(path), str(os.getpid())],
        stdout=subprocess.PIPE,
        stderr=(request.work / "worker.log").open("ab"),
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(run.scale.engine.num_threads),
        },
        start_new_session=True,
        text=True,
    )
    run.children.add(process.pid)
    overran = threading.Event()

    def cut() -> None:
        overran.set()
        _kill_group(process.pid)

    timer = threading.Timer(deadline_s, cut)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            sys.stderr.write(line)
        code = process.wait()
    finally:
        timer.cancel()
        _kill_group(process.pid)
        run.children.discard(process.pid)
    if overran.is_set():
        raise StageError(f"{request.stage} overran its deadline of {deadline_s:.0f} s and was cut")
    if code:
        _raise(request, code, error_file)


def _raise(request: Request, code: int, error_file: Path) -> None:
    said = error_file.read_text() if error_file.is_file() else f"worker ended with status {code}"
    log = request.work / "worker.log"
    if code == EXIT_CONFIG:
        raise ConfigError(said)
    raise StageError(f"{request.stage}: {said} (log: {log})")


def _kill_group(group: int) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(0.05)
