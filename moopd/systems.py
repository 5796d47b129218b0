"""The systems as rows: what is trained, by which Searcher signal, against which teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

BASE = "base"
"""Name of the untrained policy wherever a system or a teacher is named."""


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OutcomeBonusSignal(_Row):
    """Stage I: R_S = 0.9 R_EM + 0.1 b (section 3.2)."""

    kind: Literal["outcome_bonus"]


class OutcomeSignal(_Row):
    """Ablation: the final-answer reward R_EM on every Searcher token (section 4.2)."""

    kind: Literal["outcome"]


class CriticSignal(_Row):
    """Prompted Critic: a judge's 0/1 on each report (section B.1)."""

    kind: Literal["critic"]


class OpdSignal(_Row):
    """beta * (log teacher - log old) on Searcher tokens (section 3.3)."""

    kind: Literal["opd"]
    teacher: str


class NoSignal(_Row):
    """Ablation: no direct Searcher loss; its tokens leave the loss altogether (section 4.2)."""

    kind: Literal["none"]


SearcherSignal = Annotated[
    OutcomeBonusSignal | OutcomeSignal | CriticSignal | OpdSignal | NoSignal,
    Field(discriminator="kind"),
]


class TrainRow(_Row):
    searcher: SearcherSignal
    kl_teacher: str | None = None
    """Whose policy the Leader/Answerer KL penalty pulls toward; none in Stage I."""
    advantage: Literal["grpo"] = "grpo"

    @property
    def opd_teacher(self) -> str | None:
        return self.searcher.teacher if isinstance(self.searcher, OpdSignal) else None

    @property
    def teachers(self) -> tuple[str, ...]:
        """Distinct policies that must score this row's trajectories; `base` included."""
        named = (self.opd_teacher, self.kl_teacher)
        return tuple(dict.fromkeys(name for name in named if name is not None))


class Reported(_Row):
    """The paper's numbers, in percent (avg_at_4, pass_at_4, all_4) and per workflow (the rest)."""

    avg_at_4: float | None = None
    pass_at_4: float | None = None
    all_4: float | None = None
    searches: float | None = None
    input_tokens: float | None = None
    output_tokens: float | None = None
    per_set: dict[str, float] = {}
    """avg@4 of single sets."""
    leads: dict[str, tuple[float, float, float]] = {}
    """Paired difference (this row - the named one) in macro avg@4, and its interval."""
    shares: dict[str, float] = {}
    """Collapse diagnostics on the test: no_search, with_subtasks, with_reports, with_answer."""


CheckpointChoice = Literal["best", "last"]


class System(_Row):
    name: str
    title: str
    workflow: Literal["cascade", "hierarchy"]
    train: TrainRow | None = None
    checkpoints: tuple[CheckpointChoice, ...] = ("best",)
    reported: Reported = Reported()

    @property
    def evaluated_as(self) -> tuple[tuple[str, CheckpointChoice], ...]:
        """(row name in tables, checkpoint): the first checkpoint keeps the system's name."""
        first, *rest = self.checkpoints
        return ((self.name, first), *((f"{self.name}_{choice}", choice) for choice in rest))


def load_systems(path: Path) -> dict[str, System]:
    """Read systems.yaml. Raises ValueError when a teacher is unknown or untrained."""
    rows = yaml.safe_load(path.read_text(encoding="utf-8"))
    systems = {name: System(name=name, **row) for name, row in rows.items()}
    for system in systems.values():
        for teacher in system.train.teachers if system.train else ():
            if teacher != BASE and (teacher not in systems or systems[teacher].train is None):
                raise ValueError(
                    f"{path}: system {system.name!r} names teacher {teacher!r}, which is no "
                    f"trained system; use {BASE!r} or one of "
                    f"{[s for s in systems if systems[s].train]}"
                )
    training_order(systems, tuple(systems))
    return systems


def training_order(systems: dict[str, System], wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Trained systems needed for `wanted`, every teacher before its students."""
    order: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            raise ValueError(f"teachers form a cycle: {' -> '.join((*path, name))}")
        if name not in systems:
            raise ValueError(f"unknown system {name!r}; known: {', '.join(systems)}")
        train = systems[name].train
        if train is None or name in order:
            return
        for teacher in train.teachers:
            if teacher != BASE:
                visit(teacher, (*path, name))
        order.append(name)

    for name in wanted:
        visit(name, ())
    return tuple(order)
