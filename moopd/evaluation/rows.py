"""The rows of every table: which record names belong to which system, in the paper's order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from moopd.systems import Reported, System


@dataclass(frozen=True)
class Row:
    """One evaluated policy; `system` is None for records of others."""

    name: str
    title: str
    checkpoint: str
    system: System | None = None
    reported: Reported = field(default_factory=Reported)

    @property
    def is_ablation(self) -> bool:
        """Rows that exist at the fixed last step alone (the ablation table)."""
        return self.system is not None and self.system.checkpoints == ("last",)


def rows_in_order(names: Iterable[str], systems: Mapping[str, System]) -> list[Row]:
    """Rows of systems.yaml first, in its order, then unknown names as they came."""
    wanted = list(dict.fromkeys(names))
    known = {row.name: row for system in systems.values() for row in _rows_of(system)}
    own = [row for name, row in known.items() if name in wanted]
    return [*own, *(Row(name, name, "") for name in wanted if name not in known)]


def partner_at_last_step(reference: str, rows: Iterable[Row]) -> str | None:
    """The reference's own row at the last step: what ablations are compared with."""
    rows = list(rows)
    system = next(row.system for row in rows if row.name == reference)
    for row in rows:
        if system is not None and row.system is system and row.checkpoint == "last":
            return row.name
    return None


def _rows_of(system: System) -> list[Row]:
    rows = []
    for place, (name, choice) in enumerate(system.evaluated_as):
        # The paper gives one number per system; a further checkpoint has none of its own.
        title = system.title if place == 0 else f"{system.title} ({choice} step)"
        reported = system.reported if place == 0 else Reported()
        checkpoint = choice if system.train is not None else "untrained"
        rows.append(Row(name, title, checkpoint, system, reported))
    return rows
