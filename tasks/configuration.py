"""Names on the command line -> typed configuration."""

from __future__ import annotations

from collections.abc import Sequence

from moopd.config import Scale, load_scale
from moopd.systems import System, load_systems
from tasks.home import CONFIGS


def load_configuration(scale: str, overrides: Sequence[str]) -> tuple[Scale, dict[str, System]]:
    settings = load_scale(CONFIGS / "scale" / f"{scale}.yaml", overrides)
    return settings, load_systems(CONFIGS / "systems.yaml")


def wanted_systems(
    scale: Scale, systems: dict[str, System], asked: Sequence[str] | None
) -> tuple[str, ...]:
    """Rows asked for on the command line, else those of the scale, else all."""
    names = tuple(asked or scale.systems or systems)
    for name in names:
        if name not in systems:
            raise ValueError(f"unknown system {name!r}; known: {', '.join(systems)}")
    return names
