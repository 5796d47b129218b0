"""Which stages of the pipeline a run touches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.stages import Stage


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
