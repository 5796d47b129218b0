"""`moopd doctor`: what is installed, missing, full or blocked, and what to do about it."""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.servers import DEFAULTS, HOST
from tasks.configuration import load_configuration
from tasks.home import ROOT, Home

_NEEDED = ("prefect", "mlflow", "torch", "transformers", "pandas", "pyarrow", "bm25s")
_MIN_FREE_GB = 2.0


def check(home: Home, scale: str | None = None, overrides: Sequence[str] = ()) -> int:
    """Print every check; 2 when one that the default scale, or the named one, needs fails."""
    rows = [*_versions(), _faiss(), _disk(home), *_ports(), _gpu(), _verl()]
    if scale is not None:
        rows += _scale(home, scale, overrides)
    table = Table("check", "state", "what to do")
    for name, fine, state, advice in rows:
        table.add_row(name, Text(state, style="" if fine else "red"), Text(advice))
    Console().print(table)
    return 0 if all(fine for _, fine, *_ in rows) else 2


Row = tuple[str, bool, str, str]


def _versions() -> list[Row]:
    rows: list[Row] = [("python", sys.version_info >= (3, 11), sys.version.split()[0], "")]
    for name in _NEEDED:
        found = _version(name)
        rows.append((name, found is not None, found or "missing", "" if found else "make setup"))
    return rows


def _scale(home: Home, scale: str, overrides: Sequence[str]) -> list[Row]:
    """What the scale reads from outside, and what the distributed trainer needs."""
    settings, systems = load_configuration(scale, overrides)
    if settings.training.trainer == "verl":
        from moopd.trainers.verl_plugin.preflight import preflight

        checks = preflight(settings, systems, home.root)
        return [
            (one.name, one.ok, *((one.message, "") if one.ok else ("not ready", one.message)))
            for one in checks
        ]
    needed = {"data.path": settings.data.path} if settings.data.source == "files" else {}
    if settings.model.kind == "pretrained":
        needed["model.path"] = settings.model.path
    return [_place(key, path) for key, path in needed.items()]


def _place(key: str, path: str | None) -> Row:
    """A path that is there; a model may be a hub name, of which nothing is known here."""
    if path is None:
        return key, False, "not set", f"--set {key}=PLACE"
    there = Path(path).exists() or (key == "model.path" and not path.startswith(("/", ".")))
    return key, there, path, "" if there else f"nothing is there: --set {key}=PLACE"


def _faiss() -> Row:
    wheels = [name for name in ("faiss-cpu", "faiss-gpu-cu12", "faiss-gpu") if _version(name)]
    if len(wheels) > 1:
        return "faiss", False, " and ".join(wheels), "both ship one module: uninstall one of them"
    return "faiss", bool(wheels), wheels[0] if wheels else "missing", "" if wheels else "make setup"


def _disk(home: Home) -> Row:
    free = shutil.disk_usage(home.root).free / 1e9
    advice = "" if free > _MIN_FREE_GB else "free some, or another place with MOOPD_HOME"
    return "free disk", free > _MIN_FREE_GB, f"{free:.0f} GB in {home.root}", advice


def _ports() -> list[Row]:
    rows: list[Row] = []
    for name, address in DEFAULTS.items():
        port = int(address.rpartition(":")[2])
        with socket.socket() as probe:
            taken = probe.connect_ex((HOST, port)) == 0
        state = "in use" if taken else "free"
        rows.append(
            (f"port {port} ({name})", True, state, "moopd up takes another" if taken else "")
        )
    return rows


def _gpu() -> Row:
    there = Path("/proc/driver/nvidia/version").exists()
    return "GPU", True, "present" if there else "none (scales tiny and mini need none)", ""


def _verl() -> Row:
    there = (ROOT / ".venv-verl" / "bin" / "python").exists()
    return (
        "verl environment",
        True,
        ".venv-verl" if there else "not built",
        ("" if there else "make verl-env (scale paper only)"),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
