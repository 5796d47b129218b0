"""The whole paper on one page: questions, index, base, Stage I, teacher, Stage II, report."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.task_runners import ThreadPoolTaskRunner

from moopd.config import Scale
from moopd.systems import System
from moopd.tracking import journal
from moopd.types import ArtifactRef
from tasks import artifacts
from tasks.configuration import load_configuration, wanted_systems
from tasks.execute import MissingInput, Run, StageError, register, stage_result
from tasks.home import Home, open_home
from tasks.keys import facets, key_of
from tasks.stages import Stage, levels, pipeline


@dataclass(frozen=True)
class Selection:
    """Which stages of the pipeline a run touches; the rest must be there already."""

    only: tuple[str, ...] = ()
    start: str | None = None
    force: tuple[str, ...] = ()

    def wanted(self, stages: Sequence[Stage]) -> list[Stage]:
        """Raises ValueError for a stage that the pipeline does not have."""
        names = [stage.name for stage in stages]
        for name in (*self.only, *self.force, *([self.start] if self.start else [])):
            if not any(matches(known, name) for known in names):
                raise ValueError(f"no stage {name!r}; known: {', '.join(names)}")
        if self.only:
            return [s for s in stages if any(matches(s.name, name) for name in self.only)]
        if self.start:
            first = next(n for n, s in enumerate(stages) if matches(s.name, self.start))
            return list(stages[first:])
        return list(stages)

    def forced(self, stage: Stage) -> bool:
        return any(matches(stage.name, name) for name in self.force)


def matches(stage: str, asked: str) -> bool:
    """`train` means every training stage, `train/cmas_rl` that one."""
    return stage == asked or stage.startswith(f"{asked}/")


_WORKERS = int(os.environ.get("MOOPD_WORKERS", "2"))
"""Stages that run side by side; each is one process with the scale's number of threads."""


@flow(
    name="reproduce",
    task_runner=ThreadPoolTaskRunner(max_workers=_WORKERS),  # type: ignore[arg-type]
    validate_parameters=False,
)
def reproduce(
    scale: str = "tiny",
    systems: list[str] | None = None,
    overrides: list[str] | None = None,
    seeds: int = 1,
    only: list[str] | None = None,
    start: str | None = None,
    force: list[str] | None = None,
    home: str | None = None,
) -> dict[str, str]:
    """Every stage that is wanted, in order of need; returns stage -> artifact path.

    Stages of one level run side by side. A stage whose key has a whole artifact is a cache hit.
    """
    settings, rows = load_configuration(scale, overrides or [])
    stages = pipeline(settings, rows, wanted_systems(settings, rows, systems), seeds)
    selection = Selection(tuple(only or ()), start, tuple(force or ()))
    with open_run(open_home(home), settings, rows) as run:
        refs = execute(run, stages, selection)
    return {name: ref.path for name, ref in refs.items()}


def execute(run: Run, stages: Sequence[Stage], selection: Selection) -> dict[str, ArtifactRef]:
    """Level by level: submit what is wanted, take what is not from its artifact."""
    chosen = {stage.name for stage in selection.wanted(stages)}
    refs: dict[str, ArtifactRef] = {}
    for level in levels(stages):
        for stage in level:
            if stage.name not in chosen:
                refs |= _existing(run.home, stage, refs)
        ready = [s for s in level if s.name in chosen]
        missing = sorted({n for s in ready for n in s.needs if n not in refs})
        if missing:
            raise MissingInput(missing)
        futures = [(s, stage_result(run, s, refs, force=selection.forced(s))) for s in ready]
        refs |= _gather(futures)
    return refs


@contextmanager
def open_run(home: Home, scale: Scale, systems: dict[str, System]) -> Iterator[Run]:
    """A journalled run under the home's lock; lost runs before it are marked first."""
    journal.reap(home.journal)
    run_id = os.environ.get("MOOPD_RUN_ID") or journal.new_run_id()
    book = journal.Journal(home.journal, run_id)
    run = Run(run_id, home, scale, systems, book)
    register(run)
    with journal.hold(home.journal, run_id):
        book.write(
            "run_started", run=run_id, scale=scale.model_dump(mode="json"), pid=os.getpid(),
            systems=list(systems), commit=_commit(),
        )  # fmt: skip
        state = "failed"
        try:
            yield run
            state = "finished"
        except (KeyboardInterrupt, SystemExit):
            state = "cancelled"
            raise
        finally:
            run.end_children()
            book.write("run_finished", state=state)


def _existing(home: Home, stage: Stage, refs: dict[str, ArtifactRef]) -> dict[str, ArtifactRef]:
    """The artifact of a stage that is not to run: the one that fits, if there is one."""
    if any(need not in refs for need in stage.needs):
        return {}
    found = artifacts.find(home, stage.name, key_of(facets(stage, refs)))
    return {} if found is None else {stage.name: found.ref}


def _gather(futures: Sequence[tuple[Stage, Any]]) -> dict[str, ArtifactRef]:
    """Wait for all of a level before the first failure is raised, so that nothing is half done."""
    refs: dict[str, ArtifactRef] = {}
    failure: Exception | None = None
    for stage, future in futures:
        try:
            ref = ArtifactRef(**future.result())
            problem = artifacts.verify(ref)
            if problem is not None:
                raise StageError(problem)
            refs[stage.name] = ref
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


def raise_on_sigterm() -> None:
    """SIGTERM ends the run like Ctrl-C, so that children end and the journal is closed."""

    def handler(_number: int, _frame: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, handler)
