"""Checks before a distributed run, so that it fails in seconds and not after hours."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from moopd.config import ConfigError, Scale
from moopd.http_client import failure
from moopd.rl.critic import JudgeError, require_judge
from moopd.systems import System
from moopd.trainers.verl_plugin.estimate import (
    GB,
    Measured,
    disk,
    memory_per_gpu,
    retrieval,
    shape_of,
)
from moopd.trainers.verl_plugin.launch import verl_environment, verl_python
from moopd.trainers.verl_plugin.overrides import CPU_REPLICA
from moopd.trainers.verl_plugin.spec import VERL_VERSION

_PROBE_S = 900
_TESTED = {"tensordict": "0.10.0", "TransferQueue": "0.1.11", "verl": VERL_VERSION}
_TESTED_GPU = {"sglang": "0.5.12"}
_PEAK_MARGIN = 1.2
"""Training's peak on an H200 was 1.19 times the formula's (docs/scale.md)."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    message: str


def preflight(scale: Scale, systems: Mapping[str, System], work: Path) -> list[Check]:
    """Every check that the scale calls for; failures are listed, not raised."""
    checks = [check_environment(scale), check_model(scale)]
    if scale.model.kind == "pretrained":
        checks += [check_disk(scale, systems, work), check_corpus(scale), check_host_memory(scale)]
    if scale.verl.device == "cuda":
        checks.append(check_gpus(scale))
    if any(s.train is not None and s.train.searcher.kind == "critic" for s in systems.values()):
        checks.append(check_judge(scale))
    return checks


def check_environment(scale: Scale) -> Check:
    """Versions, private signatures, the registered trainer and, on a GPU host, SGLang's imports."""
    name = "verl environment"
    try:
        python = verl_python()
    except ConfigError as error:
        return Check(name, False, str(error))
    module = "moopd.trainers.verl_plugin.probe"
    done = subprocess.run(
        [str(python), "-m", module, scale.verl.device],
        env=verl_environment(scale, Path("unused")),
        capture_output=True, text=True, timeout=_PROBE_S,
    )  # fmt: skip
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Check(name, False, f"{python}: the probe failed ({last}); run `make verl-env`")
    return judge_probe(found, scale.verl.device)


def judge_probe(found: Mapping[str, object], device: str) -> Check:
    """What the probe of verl's environment comes to."""
    versions = found["versions"]
    problems = found["problems"]
    if not isinstance(versions, dict) or not isinstance(problems, list):
        return Check("verl environment", False, f"the probe answered nonsense: {found!r:.200}")
    wanted = _TESTED | (_TESTED_GPU if device == "cuda" else {})
    wrong = [
        f"{package} is {versions.get(package)}, expected {expected}"
        for package, expected in wanted.items()
        if str(versions.get(package)).split("+")[0] != expected
    ]
    if wrong or problems:
        return Check("verl environment", False, "; ".join([*wrong, *map(str, problems)]))
    listed = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
    return Check("verl environment", True, listed)


def check_model(scale: Scale) -> Check:
    """The model's own limit holds the longest sequence, and the rollout engine exists here."""
    name = "model"
    if scale.model.kind == "tiny":
        ok = scale.verl.device == "cpu"
        expected = f"device cpu ({CPU_REPLICA})" if not ok else "tiny policy on the CPU replica"
        return Check(name, ok, expected if ok else f"a tiny policy needs verl.{expected}")
    try:
        shape = shape_of(scale)
    except ConfigError as error:
        return Check(name, False, str(error))
    return Check(name, True, f"{shape.parameters / 1e9:.2f} billion parameters")


def check_disk(scale: Scale, systems: Mapping[str, System], work: Path) -> Check:
    trained = sum(system.train is not None for system in systems.values())
    needed = disk(scale, shape_of(scale), trained)[-1].value
    existing = next(p for p in (work, *work.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free / GB
    return _enough("disk", free, needed, f"free under {existing}", "free space or move the home")


def check_host_memory(scale: Scale) -> Check:
    """The flat index is searched in memory unless a server elsewhere holds it."""
    name = "host memory"
    if scale.retrieval.kind != "dense" or scale.retrieval.device != "cpu":
        return Check(name, True, "the index is not held in this host's memory")
    needed = retrieval(scale, Measured())[0].value
    available = psutil.virtual_memory().available / GB
    advice = "serve the index from another host (retrieval.kind: remote) or from GPUs"
    return _enough(name, available, needed, "available for the index", advice)


def check_corpus(scale: Scale) -> Check:
    name = "corpus"
    if scale.retrieval.kind == "remote":
        url = f"{scale.retrieval.url}/healthz"
        cause = failure(url)
        advice = "start it or correct retrieval.url"
        return Check(
            name, not cause, f"{url} does not answer ({cause}); {advice}" if cause else url
        )
    path = Path(scale.data.corpus or scale.data.path or "")
    if path.exists():
        return Check(name, True, str(path))
    return Check(name, False, f"{path}: got nothing, expected the corpus (data.corpus); fetch it")


def check_gpus(scale: Scale) -> Check:
    """Enough GPUs, each with room for training states beside the rollout engine's share."""
    name = "GPUs"
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return Check(name, False, f"nvidia-smi failed ({error}); verl.device is cuda")
    return judge_gpus(scale, [float(line) * 2**20 / GB for line in text.split()])


def judge_gpus(scale: Scale, sizes_gb: list[float]) -> Check:
    name = "GPUs"
    if len(sizes_gb) < scale.verl.gpus:
        return Check(name, False, f"got {len(sizes_gb)} GPUs, verl.gpus is {scale.verl.gpus}")
    figures = {f.name: f.value for f in memory_per_gpu(scale, shape_of(scale))}
    # The rollout engine sleeps while the policy trains: weights and cache leave the GPU then.
    needed = max(figures["training peak"] * _PEAK_MARGIN, figures["rollout weights"] * 1.5)
    advice = "raise verl.gpus or lower training.tokens_per_microbatch"
    return _enough(name, min(sizes_gb), needed, "on the smallest GPU", advice)


def check_judge(scale: Scale) -> Check:
    if scale.critic.kind != "http":
        message = f"critic.kind is {scale.critic.kind}, expected http with critic.url"
        return Check("judge", False, message)
    try:
        return Check("judge", True, require_judge(scale.critic))
    except (ConfigError, JudgeError) as error:
        return Check("judge", False, str(error))


def _enough(name: str, got: float, needed: float, where: str, advice: str) -> Check:
    if got >= needed:
        return Check(name, True, f"{got:,.0f} GB {where}, {needed:,.0f} GB needed")
    return Check(name, False, f"got {got:,.0f} GB {where}, expected {needed:,.0f} GB; {advice}")
