"""How an index comes to lie on disk: one builder at a time, resumable, renamed when complete."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moopd.retrieval.base import IndexBuildError, IndexMismatchError

FINGERPRINT = "fingerprint.json"
_PLAN = "plan.json"
_SPARE_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Called with (passages done, passages in all)."""


def read_fingerprint(folder: Path) -> dict[str, Any]:
    """The fingerprint of a complete index. Raises IndexMismatchError where a file is amiss."""
    path = folder / FINGERPRINT
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IndexMismatchError(
            f"{folder}: got no {FINGERPRINT}, expected a complete index; build it first"
        ) from None
    except (OSError, ValueError) as error:
        raise IndexMismatchError(f"{path}: not readable ({error}); build the index again") from None
    if not isinstance(found, dict) or not isinstance(found.get("files"), dict):
        raise IndexMismatchError(f"{path}: got no index fingerprint; build the index again")
    for name, size in found["files"].items():
        file = folder / name
        got = file.stat().st_size if file.is_file() else None
        if got != size:
            raise IndexMismatchError(
                f"{file}: got {'no file' if got is None else f'{got} bytes'}, expected {size} "
                "bytes; build the index again"
            )
    return found


def require_equal(
    got: Mapping[str, Any], expected: Mapping[str, Any], what: str, advice: str
) -> None:
    """Raise IndexMismatchError naming every field in which two fingerprints differ."""
    fields = [key for key in {**expected, **got} if got.get(key) != expected.get(key)]
    if fields:
        lines = [f"{key}: got {got.get(key)!r}, expected {expected.get(key)!r}" for key in fields]
        raise IndexMismatchError(f"{what}: {'; '.join(lines)}; {advice}")


def identity(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """What decides an index's content: the fingerprint without what was measured on the result."""
    return {k: v for k, v in fingerprint.items() if k not in ("files", "probe")}


@contextmanager
def build_folder(out: Path, plan: Mapping[str, Any], num_bytes: int) -> Iterator[Path]:
    """A folder beside `out` to build in; renamed to `out` when the block ends without an error.

    What an interrupted build with the same plan left is still there; another plan starts afresh.
    Raises IndexBuildError when `num_bytes` do not fit on the disk.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = out.parent / f".{out.name}.building"
    text = json.dumps(plan, sort_keys=True, indent=1)
    with _locked(out.parent / f".{out.name}.lock"):
        plan_file = folder / _PLAN
        if not plan_file.is_file() or plan_file.read_text(encoding="utf-8") != text:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        _require_space(folder, num_bytes)
        write_text(plan_file, text)
        try:
            yield folder
        except OSError as error:
            raise IndexBuildError(
                f"building {out} stopped: {error}; what is done is kept, run it again"
            ) from error
        plan_file.unlink()
        _replace(out, folder)


def seal(folder: Path, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Write the fingerprint with the size of every file, last; only then is an index complete."""
    names = sorted(
        str(file.relative_to(folder))
        for file in folder.rglob("*")
        if file.is_file() and file.name not in (_PLAN, FINGERPRINT)
    )
    sealed = {**fingerprint, "files": {name: (folder / name).stat().st_size for name in names}}
    write_text(folder / FINGERPRINT, json.dumps(sealed, sort_keys=True, indent=1) + "\n")
    return sealed


def write_text(path: Path, text: str) -> None:
    with finished(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def finished(path: Path) -> Iterator[Path]:
    """A temporary name that becomes `path` after an fsync, or disappears on an error."""
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _require_space(folder: Path, num_bytes: int) -> None:
    present = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(folder).free
    needed = max(0, num_bytes - present) + _SPARE_BYTES
    if free < needed:
        raise IndexBuildError(
            f"{folder.parent}: got {free / 1e9:.2f} GB of free disk, expected {needed / 1e9:.2f} "
            "GB for the index; free some or choose another place"
        )


def _replace(out: Path, folder: Path) -> None:
    old = out.parent / f".{out.name}.old"
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)
