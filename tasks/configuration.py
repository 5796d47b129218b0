"""Names on the command line -> typed configuration."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError

from moopd.config import ConfigError, Scale, load_scale, read_mapping
from moopd.systems import System, load_systems
from tasks.home import CONFIGS


def load_configuration(scale: str, overrides: Sequence[str]) -> tuple[Scale, dict[str, System]]:
    known = sorted(path.stem for path in (CONFIGS / "scale").glob("*.yaml"))
    if scale not in known:
        raise ConfigError(f"no scale {scale!r}; known: {', '.join(known)}")
    settings = load_scale(CONFIGS / "scale" / f"{scale}.yaml", overrides)
    return settings, _systems()


def wanted_systems(
    scale: Scale, systems: dict[str, System], asked: Sequence[str] | None
) -> tuple[str, ...]:
    """Rows asked for on the command line, else those of the scale, else all; each once."""
    names = tuple(dict.fromkeys(asked or scale.systems or systems))
    for name in names:
        if name not in systems:
            raise ValueError(f"unknown system {name!r}; known: {', '.join(systems)}")
    return names


def _systems() -> dict[str, System]:
    path = CONFIGS / "systems.yaml"
    read_mapping(path)
    try:
        return load_systems(path)
    except (TypeError, ValidationError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(f"{path}: {cause}") from None
