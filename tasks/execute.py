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
from tasks.children import Children
from tasks.home import ROOT, Home, stage_folder
from tasks.keys import facets, key_of
from tasks.mirroring import Mirroring
from tasks.progress import PlainProgress, Progress
from tasks.stages import MissingInput, Stage
from tasks.worker import EXIT_CONFIG, Request, write_request


class StageError(RuntimeError):
    """A stage failed; the message is the worker's own."""


class DeadlineError(StageError):
    """A stage was cut at its deadline; the next run goes on from its last checkpoint."""


class CancelledError(RuntimeError):
    """The run ends; nothing new is started."""


@dataclass
class Run:
    """What all stages of one pipeline run share."""

    id: str
    home: Home
    scale: Scale
    systems: dict[str, System]
    journal: Journal
    mirroring: Mirroring
    flow_run: str | None = None
    progress: Progress = field(default_factory=PlainProgress)
    children: Children = field(default_factory=Children)
    verify: bool = False
    """Compare the bytes of every hit with its manifest, not the sizes alone."""
    taken: set[str] = field(default_factory=set)
    submitted: int = 0
    """Prefect tasks of this run: so many rows its database must hold at the end."""


# The run is looked up by id, so that Prefect sees (and stores) small JSON parameters only.
_RUNS: dict[str, Run] = {}


def register(run: Run) -> None:
    _RUNS[run.id] = run


def finished_run(run_id: str) -> tuple[str | None, int]:
    """Prefect's id of a run (None when it never began) and how many tasks it submitted."""
    run = _RUNS.get(run_id)
    return (None, 0) if run is None else (run.flow_run, run.submitted)


def _worth_retrying(_task: object, _run: object, state: Any) -> bool:
    """Bad configuration does not get better by trying again."""
    try:
        state.result(raise_on_failure=True)
    except (ConfigError, MissingInput, DeadlineError, CancelledError):
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
def run_stage(
    name: str, key: str, run_id: str, stage: Any, inputs: Any, force: bool
) -> dict[str, str]:
    """Compute a stage's artifact, or wait for whoever computes the same key and take theirs."""
    run = _RUNS[run_id]
    with artifacts.locked(run.home, key):
        done = None if force else find(run, name, key)
        if done is not None:
            return asdict(_taken(run, stage, key, done))
        # Under the lock: nobody else can have sealed this folder in between.
        artifacts.quarantine(run.home, artifacts.final_path(run.home, name, key))
        with run.children.attempt():
            return asdict(_compute(run, stage, key, inputs))


def find(run: Run, name: str, key: str) -> artifacts.Artifact | None:
    return artifacts.find(run.home, name, key, deep=run.verify)


@dataclass(frozen=True)
class Pending:
    """A stage that was submitted."""

    stage: Stage
    future: Any
    hit: ArtifactRef | None

    def result(self) -> ArtifactRef:
        """Waits. Raises what the stage raised, or StageError for a result that is not whole."""
        got = ArtifactRef(**self.future.result())
        # What Prefect remembers of a hit may be older than the artifact that was verified.
        ref = self.hit or got
        problem = artifacts.verify(ref)
        if problem is not None:
            raise StageError(problem)
        return ref


def stage_result(
    run: Run, stage: Stage, inputs: Mapping[str, ArtifactRef], *, force: bool = False
) -> Pending:
    """Submit a stage: computed, or taken from whoever has it."""
    given = {name: inputs[name] for name in stage.needs}
    key = key_of(facets(stage, given))
    hit = None if force else find(run, stage.name, key)
    if hit is not None:
        _taken(run, stage, key, hit)
    # Prefect's own result may outlive a removed artifact: what is not there is computed anew.
    chosen = run_stage.with_options(refresh_cache=hit is None)
    run.submitted += 1
    future = chosen.submit(
        name=stage.name, key=key, run_id=run.id, stage=stage, inputs=given, force=force
    )
    return Pending(stage, future, None if hit is None else hit.ref)


def _taken(run: Run, stage: Stage, key: str, hit: artifacts.Artifact) -> ArtifactRef:
    """Said once: Prefect asks again where it does not have the result itself."""
    if stage.name not in run.taken:
        run.taken.add(stage.name)
        run.journal.write(
            "stage_cached", stage=stage.name, key=key, sha256=hit.ref.sha256, origin=hit.run
        )
        run.progress.ended(stage.name, "cached")
    return hit.ref


def _compute(run: Run, stage: Stage, key: str, inputs: Mapping[str, ArtifactRef]) -> ArtifactRef:
    if run.children.closed:
        raise CancelledError(f"{stage.name} was not started: the run ends")
    temporary = artifacts.temporary_path(run.home, stage.name, key)
    work = run.home.work / stage_folder(stage.name) / key[:16]
    work.mkdir(parents=True, exist_ok=True)
    attempt = f"{stage_folder(stage.name)}-{time.time_ns()}"
    run.journal.write(
        "stage_started", stage=stage.name, key=key, attempt=attempt, pid=os.getpid(),
        seed=stage.seed, reads=stage.reads,
    )  # fmt: skip
    run.progress.started(stage.name)
    started = time.monotonic()
    try:
        _run_worker(run, _request(run, stage, inputs, temporary, work, attempt))
        seconds = time.monotonic() - started
        ref = artifacts.finish(
            temporary, run.home, stage.name, key, facets(stage, inputs), seconds, run.id
        )
    except BaseException as error:
        cancelled = run.children.closed
        run.journal.write(
            "stage_failed", stage=stage.name, attempt=attempt, error=str(error)[:2000],
            seconds=round(time.monotonic() - started, 3), cancelled=cancelled,
            log=str(work / "worker.log"),
        )  # fmt: skip
        run.progress.ended(stage.name, "cancelled" if cancelled else "failed")
        run.mirroring.poke()
        if cancelled:
            raise CancelledError(f"{stage.name} was ended with the run") from error
        raise
    run.journal.write(
        "stage_finished", stage=stage.name, attempt=attempt, key=key, sha256=ref.sha256,
        path=ref.path, seconds=round(seconds, 3),
    )  # fmt: skip
    run.progress.ended(stage.name, f"{seconds:.0f} s")
    run.mirroring.poke()
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


def _run_worker(run: Run, request: Request) -> None:
    deadline_s = 3600 * run.scale.deadline_hours
    path = request.work / "request.json"
    write_request(path, request)
    error_file = path.with_suffix(".error")
    error_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tasks.worker", str(path), str(os.getpid())]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(run.scale.engine.num_threads),
    }
    with (request.work / "worker.log").open("ab") as log:
        process = run.children.start(
            command, stdout=subprocess.PIPE, stderr=log, cwd=ROOT, env=environment
        )
        if process is None:
            raise CancelledError(f"{request.stage} was not started: the run ends")
        overran = threading.Event()

        def cut() -> None:
            overran.set()
            run.children.end(process)

        timer = threading.Timer(deadline_s, cut)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                run.progress.line(request.stage, line.decode(errors="replace").rstrip())
            code = process.wait()
        finally:
            timer.cancel()
            run.children.end(process)
    if overran.is_set():
        raise DeadlineError(
            f"{request.stage} overran its deadline of {deadline_s:.0f} s and was cut"
        )
    if code:
        _raise(request, code, error_file)


def _raise(request: Request, code: int, error_file: Path) -> None:
    said = error_file.read_text() if error_file.is_file() else _ending(code)
    log = request.work / "worker.log"
    if code == EXIT_CONFIG:
        raise ConfigError(said)
    raise StageError(f"{request.stage}: {said} (log: {log})")


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "the worker was killed (out of memory?); the next run goes on from its checkpoint"
    return f"the worker ended with status {code}"
