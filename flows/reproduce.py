"""The whole paper on one page: questions, index, base, Stage I, teacher, Stage II, report."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from flows import prefect_state
from flows.failures import write_failures
from flows.selection import Selection
from moopd.config import Scale
from moopd.systems import System
from moopd.tracking import journal
from moopd.types import ArtifactRef
from tasks import artifacts
from tasks.configuration import load_configuration, wanted_systems
from tasks.execute import Pending, Run, register, stage_result
from tasks.home import Home, open_home
from tasks.keys import environment
from tasks.mirroring import Mirroring
from tasks.progress import progress_for_stderr
from tasks.stages import MissingInput, Stage, below, levels, pipeline

_WORKERS = int(os.environ.get("MOOPD_WORKERS", "2"))
"""Stages that run side by side; each is one process with the scale's number of threads."""


task_runner: Any = ThreadPoolTaskRunner(max_workers=_WORKERS)


@flow(name="reproduce", task_runner=task_runner, validate_parameters=False)
def reproduce(
    scale: str = "tiny",
    systems: list[str] | None = None,
    overrides: list[str] | None = None,
    seeds: int = 1,
    only: list[str] | None = None,
    start: str | None = None,
    force: list[str] | None = None,
    verify: bool = False,
    home: str | None = None,
    run_id: str | None = None,
) -> dict[str, str]:
    """Every stage that is wanted, in order of need; returns stage -> artifact path.

    Stages of one level run side by side. A stage whose key has a whole artifact is a cache hit.
    """
    settings, rows = load_configuration(scale, overrides or [])
    stages = pipeline(settings, rows, wanted_systems(settings, rows, systems), seeds)
    selection = Selection(tuple(only or ()), start, tuple(force or ()))
    with open_run(open_home(home), settings, rows, run_id, verify=verify) as run:
        run.progress.total(len(selection.wanted(stages)))
        refs = execute(run, stages, selection)
    return {name: ref.path for name, ref in refs.items()}


def execute(run: Run, stages: Sequence[Stage], selection: Selection) -> dict[str, ArtifactRef]:
    """Level by level: submit what is wanted, take what is not from its artifact."""
    chosen = {stage.name for stage in selection.wanted(stages)}
    refs: dict[str, ArtifactRef] = {}
    for level in levels(stages):
        for stage in level:
            if stage.name not in chosen:
                found = artifacts.existing(run.home, stage, refs, deep=run.verify)
                refs |= {} if found is None else {stage.name: found.ref}
        ready = [s for s in level if s.name in chosen]
        needed = below(stages, *(name for stage in ready for name in stage.needs))
        missing = [stage.name for stage in needed if stage.name not in refs]
        if missing:
            raise MissingInput(missing)
        refs |= _gather([stage_result(run, s, refs, force=selection.forced(s)) for s in ready])
    return refs


@contextmanager
def open_run(
    home: Home,
    scale: Scale,
    systems: dict[str, System],
    run_id: str | None = None,
    *,
    verify: bool = False,
) -> Iterator[Run]:
    """A journalled run under the home's lock; lost runs before it are marked first."""
    run_id = run_id or journal.new_run_id()
    book = journal.Journal(home.journal, run_id)
    mirroring = Mirroring(home)
    run = Run(
        run_id, home, scale, systems, book, mirroring, flow_run.id, progress_for_stderr(),
        verify=verify,
    )  # fmt: skip
    register(run)
    with journal.hold(home.journal, run_id):
        book.write(
            "run_started", run=run_id, scale=scale.model_dump(mode="json"), pid=os.getpid(),
            systems=list(systems), commit=_commit(), flow_run=flow_run.id,
            environment={**environment(), "python": platform.python_version(),
                         "machine": platform.machine(), "host": platform.node()},
        )  # fmt: skip
        journal.reap(home.journal)
        prefect_state.reap(home, flow_run.id)
        state = "failed"
        try:
            yield run
            state = "finished"
        except Exception:
            raise
        except BaseException:
            state = "cancelled"
            raise
        finally:
            run.children.close()
            run.progress.close()
            book.write("run_finished", state=state)
            page = write_failures(home, run_id) if state == "failed" else None
            if page:
                print(f"moopd: what failed, and why: {page}", file=sys.stderr)
            cancelled = state == "cancelled"
            mirroring.finish(_CANCELLED_S if cancelled else _FINISHED_S, quiet=cancelled)


_FINISHED_S, _CANCELLED_S = 120.0, 5.0
"""How long the end of a run waits for MLflow."""


def _gather(pending: Sequence[Pending]) -> dict[str, ArtifactRef]:
    """Wait for all of a level before the first failure is raised, so that nothing is half done."""
    refs: dict[str, ArtifactRef] = {}
    failure: Exception | None = None
    for one in pending:
        try:
            refs[one.stage.name] = one.result()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
    return refs


def _commit() -> str:
    """The git commit of the code, empty outside a checkout."""
    head = Path(__file__).resolve().parents[1] / ".git" / "HEAD"
    try:
        text = head.read_text().strip()
        ref = head.parent / text.removeprefix("ref: ")
        return ref.read_text().strip() if text.startswith("ref: ") else text
    except OSError:
        return ""
