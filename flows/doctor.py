"""`moopd doctor`: what is installed, missing, full or blocked, and what to do about it."""

from __future__ import annotations

import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.servers import DEFAULTS, HOST
from tasks.home import ROOT, Home

_NEEDED = ("prefect", "mlflow", "torch", "transformers", "pandas", "pyarrow", "bm25s")
_MIN_FREE_GB = 2.0


def check(home: Home) -> int:
    """Print every check; 2 when one that the default scale needs fails, else 0."""
    rows = [*_versions(), _faiss(), _disk(home), *_ports(), _gpu(), _verl()]
    table = Table("check", "state", "what to do")
    for name, fine, state, advice in rows:
        table.add_row(name, state if fine else f"[red]{state}[/red]", advice)
    Console().print(table)
    return 0 if all(fine for _, fine, *_ in rows) else 2


Row = tuple[str, bool, str, str]


def _versions() -> list[Row]:
    rows: list[Row] = [("python", sys.version_info >= (3, 11), sys.version.split()[0], "")]
    for name in _NEEDED:
        found = _version(name)
        rows.append((name, found is not None, found or "missing", "" if found else "make setup"))
    return rows


def _faiss() -> Row:
    wheels = [name for name in ("faiss-cpu", "faiss-gpu-cu12", "faiss-gpu") if _version(name)]
    if len(wheels) > 1:
        return "faiss", False, " and ".join(wheels), "both ship one module: uninstall one of them"
    return "faiss", bool(wheels), wheels[0] if wheels else "missing", "" if wheels else "make setup"


def _disk(home: Home) -> Row:
    free = shutil.disk_usage(home.root).free / 1e9
    return "free disk", free > _MIN_FREE_GB, f"{free:.0f} GB in {home.root}", ""


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
