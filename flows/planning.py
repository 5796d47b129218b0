"""What would run and what ran, from artifacts and the journal alone."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moopd.tracking import journal
from moopd.types import ArtifactRef
from tasks import artifacts
from tasks.configuration import load_configuration, wanted_systems
from tasks.home import Home
from tasks.keys import changed, facets, key_of
from tasks.stages import Stage, pipeline


def print_plan(
    scale: str, overrides: Sequence[str], systems: Sequence[str], seeds: int, home: Home
) -> None:
    settings, rows = load_configuration(scale, overrides)
    stages = pipeline(settings, rows, wanted_systems(settings, rows, systems), seeds)
    table = Table("stage", "state", "why", "last time")
    refs: dict[str, ArtifactRef] = {}
    seconds, untimed = 0.0, 0
    for stage in stages:
        state, why, last = _state(stage, refs, home)
        table.add_row(stage.name, state, why, f"{last:.0f} s" if last else "")
        if state != "cached":
            seconds += last
            untimed += not last
    console = Console()
    console.print(table)
    rest = f", and {untimed} stages that were never timed" if untimed else ""
    console.print(f"a run would take about {seconds:.0f} s by the last timings{rest}")
    if settings.training.trainer == "verl":
        # Hardly ever run before: what it costs is computed from the config.
        from moopd.trainers.verl_plugin.estimate import estimate, render

        print(render(estimate(settings, rows)))


def _state(stage: Stage, refs: dict[str, ArtifactRef], home: Home) -> tuple[str, str, float]:
    """(cached | stale | missing | waiting, which facet changed, seconds last time)."""
    before = artifacts.previous(home, stage.name)
    last = before.seconds if before else 0.0
    if any(need not in refs for need in stage.needs):
        return "waiting", "an upstream stage runs first", last
    now = facets(stage, refs)
    found = artifacts.find(home, stage.name, key_of(now))
    if found is not None:
        refs[stage.name] = found.ref
        return "cached", "", found.seconds
    if before is None:
        return "missing", "never computed", last
    return "stale", "; ".join(list(changed(before.facets, now))[:3]) or "artifact damaged", last


def print_status(home: Home) -> None:
    """The last 20 runs: lost ones are those whose process went without a word."""
    table = Table("run", "scale", "state", "computed", "cached", "seconds", "stage")
    for run in journal.runs(home.journal)[-20:]:
        events = list(journal.read(home.journal / f"{run}.jsonl"))
        if events:
            table.add_row(run, *_status(events, journal.is_alive(home.journal, run)))
    Console().print(table)


def _status(events: list[journal.Event], alive: bool) -> tuple[str, ...]:
    state = journal.state_of(events, alive)
    stages = {name: _stages(events, f"stage_{name}") for name in _STAGE_EVENTS}
    open_ = stages["started"] - stages["finished"]
    # A lost run lasted until its last own event, not until it was found.
    times = [e["time"] for e in events if "time" in e and e["event"] != "run_lost"]
    end = time.time() if state == "running" else max(times, default=0.0)
    return (
        str(events[0].get("scale", {}).get("name", "?")),
        state,
        str(len(stages["finished"])),
        str(len(stages["cached"])),
        f"{end - min(times, default=end):.0f}",
        "" if state == "finished" else ", ".join(sorted(open_ - stages["cached"])),
    )


_STAGE_EVENTS = ("started", "finished", "cached")


def _stages(events: list[journal.Event], kind: str) -> set[str]:
    return {event["stage"] for event in events if event["event"] == kind}
