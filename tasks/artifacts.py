"""Artifacts: folders with a manifest, written to a temporary place, flushed and renamed.

A hit is verified before it is used; what is missing or damaged goes to quarantine and its stage
runs again, alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moopd.types import ArtifactRef
from tasks.home import Home, stage_folder
from tasks.keys import facets, key_of
from tasks.stages import Stage

MANIFEST = "artifact.json"


@dataclass(frozen=True, slots=True)
class Artifact:
    """A finished artifact with what it was made from."""

    ref: ArtifactRef
    facets: dict[str, Any]
    seconds: float
    run: str


def final_path(home: Home, stage: str, key: str) -> Path:
    return home.artifacts / stage_folder(stage) / key[:16]


def temporary_path(home: Home, stage: str, key: str) -> Path:
    """An empty folder beside the final one. The caller holds the lock: older ones are dead."""
    folder = home.artifacts / stage_folder(stage)
    for left in folder.glob(f".{key[:16]}.*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    path = folder / f".{key[:16]}.{os.getpid()}.tmp"
    path.mkdir(parents=True)
    return path


def finish(
    temporary: Path, home: Home, stage: str, key: str, facets: dict[str, Any], seconds: float,
    run: str,
) -> ArtifactRef:  # fmt: skip
    """Seal a temporary folder: hash, flush, manifest last, rename."""
    files = _files(temporary)
    content = _content(files)
    for name in files:
        _flush(temporary / name)
    manifest = {
        "stage": stage, "key": key, "sha256": content, "files": files, "facets": facets,
        "seconds": round(seconds, 3), "run": run,
    }  # fmt: skip
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    _flush(temporary / MANIFEST)
    final = final_path(home, stage, key)
    if final.exists():
        quarantine(home, final)
    os.replace(temporary, final)
    _flush(final.parent)
    return ArtifactRef(stage, str(final), content)


def verify(ref: ArtifactRef, *, deep: bool = False) -> str | None:
    """What is wrong with an artifact, or None. Sizes always, sha256 of the bytes when `deep`."""
    folder = Path(ref.path)
    manifest = _manifest(folder)
    if manifest is None:
        return f"{folder} has no readable {MANIFEST}, or one that was changed"
    if manifest["sha256"] != ref.sha256:
        return f"{folder} holds {manifest['sha256'][:12]}, expected {ref.sha256[:12]}"
    for name, (size, digest) in manifest["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{path} is missing or has another size than {size}"
        if deep and _digest(path) != digest:
            return f"{path} has other bytes than when it was written"
    return None


def find(home: Home, stage: str, key: str, *, deep: bool = False) -> Artifact | None:
    """The artifact of a key, if it is there and whole."""
    artifact = _read(final_path(home, stage, key))
    if artifact is None or verify(artifact.ref, deep=deep) is not None:
        return None
    return artifact


def existing(
    home: Home, stage: Stage, refs: Mapping[str, ArtifactRef], *, deep: bool = False
) -> Artifact | None:
    """The artifact that a stage has for these inputs; none where an input is not there."""
    if any(need not in refs for need in stage.needs):
        return None
    return find(home, stage.name, key_of(facets(stage, refs)), deep=deep)


def previous(home: Home, stage: str, *, whole: bool = False) -> Artifact | None:
    """The newest artifact of a stage under whatever key: what `moopd plan` compares with.

    `whole`: the newest whose bytes are those that were sealed, to show to a person.
    """
    folder = home.artifacts / stage_folder(stage)
    sealed = [path for path in folder.glob("*/" + MANIFEST) if not path.parent.name.startswith(".")]
    for path in sorted(sealed, key=lambda path: path.stat().st_mtime, reverse=True):
        artifact = _read(path.parent)
        if artifact and not (whole and verify(artifact.ref, deep=True)):
            return artifact
    return None


def quarantine(home: Home, path: Path) -> None:
    """Put a damaged artifact aside; nothing is deleted."""
    if path.exists():
        home.quarantine.mkdir(parents=True, exist_ok=True)
        target = home.quarantine / f"{path.parent.name}__{path.name}.{time.time_ns()}"
        shutil.move(path, target)


@contextlib.contextmanager
def locked(home: Home, key: str) -> Iterator[None]:
    """One computation per key at a time; the kernel frees the lock of a killed holder."""
    with (home.locks / key[:32]).open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _read(folder: Path) -> Artifact | None:
    manifest = _manifest(folder)
    if manifest is None:
        return None
    ref = ArtifactRef(manifest["stage"], str(folder), manifest["sha256"])
    return Artifact(ref, manifest["facets"], manifest["seconds"], manifest["run"])


def _manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of an artifact, or None where it is not as `finish` wrote it."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        facets, seconds = manifest["facets"], manifest["seconds"]
        fits = isinstance(facets, dict) and isinstance(seconds, (int, float))
        names = [manifest[name] for name in ("stage", "key", "run")]
        whole = fits and all(isinstance(name, str) for name in names)
        return manifest if whole and manifest["sha256"] == _content(manifest["files"]) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _content(files: dict[str, Any]) -> str:
    """The digest of an artifact: over names, sizes and digests of its files."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _files(folder: Path) -> dict[str, tuple[int, str]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_size, _digest(path))
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
