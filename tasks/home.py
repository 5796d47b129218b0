"""Where everything lands: one folder, `MOOPD_HOME` or ./data/home, and what each part of it is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from moopd.config import ConfigError

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "configs"


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under the project's home; all state is here and nowhere else."""

    root: Path

    @property
    def artifacts(self) -> Path:
        return self.root / "artifacts"

    @property
    def work(self) -> Path:
        """Resume points of stages that are not finished."""
        return self.root / "work"

    @property
    def quarantine(self) -> Path:
        return self.root / "quarantine"

    @property
    def journal(self) -> Path:
        return self.root / "journal"

    @property
    def locks(self) -> Path:
        return self.root / "locks"

    @property
    def prefect(self) -> Path:
        return self.root / "prefect"

    @property
    def mlflow(self) -> Path:
        return self.root / "mlflow"

    @property
    def server(self) -> Path:
        """Addresses of the servers that `moopd up` runs, while it runs."""
        return self.root / "server.json"

    @property
    def server_lock(self) -> Path:
        """Held by `moopd up` as long as it runs."""
        return self.root / "server.lock"


def open_home(path: str | None = None) -> Home:
    """The home, created where it is missing. Raises ConfigError when it cannot be written."""
    root = Path(path or os.environ.get("MOOPD_HOME") or ROOT / "data" / "home").resolve()
    home = Home(root)
    try:
        for folder in (
            home.artifacts, home.work, home.journal, home.locks, home.prefect, home.mlflow,
        ):  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)
        probe = root / f".writable.{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"home {root} cannot be written ({error.strerror}); set MOOPD_HOME or --home to a "
            "folder that can"
        ) from None
    return home


def stage_folder(stage: str) -> str:
    """A stage's name as one folder name."""
    return stage.replace("/", "__")
