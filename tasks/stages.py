"""The pipeline as rows: each stage with what it reads, what it needs, and which code it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from moopd.config import Scale
from moopd.systems import BASE, System, training_order

Kind = Literal["prepare", "index", "base", "train", "freeze", "evaluate", "statistics", "report"]

_CORE = ("moopd/types.py", "moopd/systems.py")
_TEAM = (
    *_CORE,
    "moopd/http_client.py",
    "moopd/roles",
    "moopd/workflows",
    "moopd/engines",
    "moopd/retrieval",
)
SOURCES: dict[Kind, tuple[str, ...]] = {
    "prepare": (*_CORE, "moopd/data"),
    "index": (*_CORE, "moopd/retrieval"),
    "base": (*_TEAM, "moopd/data", "moopd/trainers"),
    "train": (*_TEAM, "moopd/data/normalize.py", "moopd/rl", "moopd/trainers"),
    "freeze": (*_CORE, "moopd/trainers/checkpoints.py"),
    "evaluate": (
        *_TEAM,
        "moopd/evaluation/runner.py",
        "moopd/evaluation/records.py",
        "moopd/evaluation/journal.py",
        "moopd/evaluation/attempts.py",
    ),
    "statistics": (
        *_CORE,
        "moopd/evaluation",
        "moopd/data/normalize.py",
        "moopd/roles/parsing.py",
        "configs/flexible_extraction.yaml",
    ),
    "report": (*_CORE, "moopd/evaluation"),
}
"""Files and folders whose bytes are part of a stage's cache key."""

VERSIONS: dict[Kind, int] = {**dict.fromkeys(SOURCES, 1), "statistics": 2}


class MissingInput(RuntimeError):
    """Stages that were not asked for and have no artifact."""

    def __init__(self, missing: list[str]) -> None:
        super().__init__(
            f"missing upstream: {', '.join(missing)}; run these stages first (`moopd run` without "
            "--only and --from runs what is missing)"
        )
        self.missing = missing


@dataclass(frozen=True, slots=True)
class Stage:
    """One cached, retryable task. `reads`: the config values that can change its result."""

    name: str
    kind: Kind
    needs: tuple[str, ...]
    reads: dict[str, Any]
    seed: int
    system: System | None = None
    row: str = ""
    checkpoint: str = ""
    run: int = 0
    teachers: dict[str, str] = field(default_factory=dict)
    """Teacher -> the stage that froze it."""


def pipeline(
    scale: Scale, systems: dict[str, System], wanted: Sequence[str], num_seeds: int = 1
) -> list[Stage]:
    """All stages in an order in which every stage comes after what it needs."""
    rows = [systems[name] for name in wanted]
    stages = [_prepare(scale), _index(scale), _base(scale)]
    for run in range(num_seeds):
        for name in training_order(systems, tuple(wanted)):
            stages += _training(scale, systems[name], run)
    evaluations = [
        _evaluate(scale, system, row, choice, run)
        for system in rows
        for run in range(num_seeds if system.train else 1)
        for row, choice in system.evaluated_as
    ]
    results = _results(scale, rows, evaluations, num_seeds)
    return [*stages, *evaluations, *results]


def below(stages: Sequence[Stage], *names: str) -> list[Stage]:
    """The named stages and all that they need, directly or not, in order of the pipeline."""
    wanted = set(names)
    for stage in reversed(stages):
        if stage.name in wanted:
            wanted |= set(stage.needs)
    return [stage for stage in stages if stage.name in wanted]


def levels(stages: Sequence[Stage]) -> list[list[Stage]]:
    """Stages whose needs are met together: those of one level can run side by side."""
    depth: dict[str, int] = {}
    for stage in stages:
        known = [depth[need] for need in stage.needs if need in depth]
        depth[stage.name] = 1 + max(known, default=-1)
    ordered: list[list[Stage]] = [[] for _ in range(1 + max(depth.values(), default=-1))]
    for stage in stages:
        ordered[depth[stage.name]].append(stage)
    return ordered


def _dump(scale: Scale, *sections: str) -> dict[str, Any]:
    tree = scale.model_dump(mode="json", include=set(sections))
    tree.get("evaluation", {}).pop("max_live_workflows", None)
    return tree


def _prepare(scale: Scale) -> Stage:
    return Stage("prepare", "prepare", (), _dump(scale, "data"), scale.seed)


def _index(scale: Scale) -> Stage:
    return Stage("index", "index", ("prepare",), _dump(scale, "retrieval"), scale.seed)


def _base(scale: Scale) -> Stage:
    reads = _dump(scale, "model", "warm_start", "workflow", "data", "retrieval")
    return Stage("base", "base", ("prepare", "index"), reads, scale.seed)


def _suffix(run: int) -> str:
    return f"/{run}" if run else ""


def _training(scale: Scale, system: System, run: int) -> list[Stage]:
    """A training stage and the freezing of its result."""
    assert system.train is not None
    sections = ["training", "workflow", "evaluation", "model", "engine"]
    if system.train.searcher.kind == "critic":
        sections.append("critic")
    teachers = {
        name: "base" if name == BASE else f"freeze/{name}{_suffix(run)}"
        for name in system.train.teachers
    }
    train = Stage(
        name=f"train/{system.name}{_suffix(run)}",
        kind="train",
        needs=tuple(dict.fromkeys(("prepare", "index", "base", *teachers.values()))),
        reads={**_dump(scale, *sections), "top_k": scale.retrieval.top_k, **_row(system)},
        seed=scale.seed + run,
        system=system,
        run=run,
        teachers=teachers,
    )
    freeze = Stage(
        name=f"freeze/{system.name}{_suffix(run)}",
        kind="freeze",
        needs=(train.name,),
        reads={"checkpoints": system.checkpoints},
        seed=train.seed,
        system=system,
        run=run,
    )
    return [train, freeze]


def _row(system: System) -> dict[str, Any]:
    return {"system": system.model_dump(mode="json", include={"workflow", "train"})}


def _evaluate(scale: Scale, system: System, row: str, choice: str, run: int) -> Stage:
    policy = f"freeze/{system.name}{_suffix(run)}" if system.train else "base"
    reads = _dump(scale, "evaluation", "workflow", "model", "engine")
    return Stage(
        name=f"evaluate/{row}{_suffix(run)}",
        kind="evaluate",
        needs=("prepare", "index", policy),
        reads={**reads, "top_k": scale.retrieval.top_k, "row": row, **_row(system)},
        seed=scale.seed + run,
        system=system,
        row=row,
        checkpoint=choice,
        run=run,
    )


def _results(
    scale: Scale, rows: Sequence[System], evaluations: Sequence[Stage], num_seeds: int
) -> list[Stage]:
    trained = [
        f"freeze/{system.name}{_suffix(run)}"
        for system in rows
        if system.train
        for run in range(num_seeds)
    ]
    needs = ("prepare", "index", "base", *trained, *(stage.name for stage in evaluations))
    reads = {"scale": scale.model_dump(mode="json", exclude={"deadline_hours"})}
    statistics = Stage("statistics", "statistics", needs, reads, scale.seed)
    report = Stage("report", "report", ("statistics",), {}, scale.seed)
    return [statistics, report]
