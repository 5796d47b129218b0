"""Cache keys over content: what a stage reads, needs and runs; never paths, addresses, threads.

Facets are kept beside each artifact, so that a plan can say which one changed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moopd.config import JUDGE_PLACE, ConfigError
from moopd.types import ArtifactRef
from tasks.home import ROOT
from tasks.stages import SOURCES, VERSIONS, Stage

_PLACES = {"data": ("path",), "engine": ("url",), "retrieval": ("url",), "critic": JUDGE_PLACE}
"""Settings by section that say where something is, not what it is."""


def facets(stage: Stage, inputs: Mapping[str, ArtifactRef]) -> dict[str, Any]:
    """Everything that can change the stage's result, by name."""
    return {
        "stage": stage.name,
        "version": VERSIONS[stage.kind],
        "seed": stage.seed,
        "config": _without_places(stage.reads),
        "files": input_files(stage),
        "inputs": {name: inputs[name].sha256 for name in stage.needs},
        "sources": {place: source_digest(place) for place in SOURCES[stage.kind]},
        "environment": environment(),
    }


def key_of(facets: Mapping[str, Any]) -> str:
    text = json.dumps(facets, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def changed(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Readable lines: which facet differs, old and new."""
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        where = f"{path}{name}"
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from changed(before, after, f"{where}.")
        elif before != after:
            yield f"{where}: {_short(before)} -> {_short(after)}"


def input_files(stage: Stage) -> dict[str, str]:
    """Digests of the files from outside that a stage reads, by name.

    Raises ConfigError for input that cannot be read: it is never taken for something else.
    """
    data, model = stage.reads.get("data", {}), stage.reads.get("model", {})
    files: dict[str, str] = {}
    if stage.kind == "prepare" and data.get("source") == "files":
        if not data.get("path"):
            raise ConfigError(
                "got no data.path, expected a folder with questions.* and corpus.*: "
                "--set data.path=FOLDER"
            )
        files |= _digests(Path(data["path"]), needed=True)
        if data.get("corpus"):
            files |= _digests(Path(data["corpus"]), needed=True)
    if stage.kind == "base" and model.get("path"):
        files |= _digests(Path(model["path"]), needed=False)
    return files


def _digests(path: Path, *, needed: bool) -> dict[str, str]:
    """Every file under a path; a name that is no path (a hub name) has none."""
    try:
        if not needed and not path.exists():
            return {}
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        base = path if path.is_dir() else path.parent
        return {
            str(file.relative_to(base)): _file_digest(str(file), file.stat().st_mtime_ns)
            for file in found
            if not file.is_dir()
        }
    except OSError as error:
        place = str(error.filename or path)
        raise ConfigError(
            f"got an unreadable {place[:300]} ({error.strerror}); expected a file or folder to "
            "read: check data.path, data.corpus and model.path"
        ) from None


@lru_cache(maxsize=256)
def source_digest(place: str) -> str:
    """sha256 over the Python files at a path relative to the project's root."""
    path = ROOT / place
    files = [path] if path.is_file() else sorted(path.rglob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(ROOT)).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


@lru_cache(maxsize=1)
def environment() -> dict[str, str]:
    """Facets of this machine that change results; read without importing the packages."""
    versions = {name: _version(name) for name in ("torch", "transformers", "numpy")}
    device = "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"
    return {**versions, "device": device}


def _version(package: str) -> str:
    try:
        return ".".join(version(package).split("+")[0].split(".")[:2])
    except PackageNotFoundError:
        return "missing"


def _without_places(reads: Mapping[str, Any]) -> dict[str, Any]:
    """Where a file lies does not matter, what it holds does (see `input_files`)."""
    tree: dict[str, Any] = json.loads(json.dumps(reads))
    scale = tree.get("scale", tree)
    for section, places in _PLACES.items():
        for place in places:
            scale.get(section, {}).pop(place, None)
    path = scale.get("model", {}).get("path")
    if path and os.path.exists(path):
        scale["model"]["path"] = Path(path).name
    return tree


@lru_cache(maxsize=256)
def _file_digest(path: str, _mtime: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _short(value: object) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 60 else text[:12] + "..." + text[-12:]
