"""What verl's environment holds, as JSON on the last line of standard output.

Run there: `python -m moopd.trainers.verl_plugin.probe cpu|cuda`. The trainer's coordinating process
has no GPU and still imports SGLang's kernels, so on a GPU host they are imported without one too.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from moopd.trainers.verl_plugin.contract import broken_assumptions
from moopd.trainers.verl_plugin.spec import PLUGIN_MODULE, TRAINER_NAME

_PACKAGES = ("verl", "torch", "transformers", "tensordict", "TransferQueue", "ray", "sglang")
_GPU_MODULES = ("sgl_kernel", "sglang.srt.entrypoints.http_server",
                "verl.workers.rollout.sglang_rollout.async_sglang_server")  # fmt: skip


def main(device: str) -> None:
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    os.environ["VERL_USE_EXTERNAL_MODULES"] = PLUGIN_MODULE
    os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"
    found = {
        "versions": {name: _version(name) for name in _PACKAGES},
        "problems": [*broken_assumptions(), *_plugin(), *(_gpu() if device == "cuda" else ())],
    }
    print(json.dumps(found))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plugin() -> list[str]:
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY

    if TRAINER_NAME in TRAINER_REGISTRY:
        return []
    return [
        f"verl knows the trainers {sorted(TRAINER_REGISTRY)}, expected {TRAINER_NAME} among them; "
        f"importing {PLUGIN_MODULE} failed"
    ]


def _gpu() -> list[str]:
    problems = []
    for module in _GPU_MODULES:
        for hidden in (False, True):
            reason = _import_failure(module, hidden)
            if reason:
                where = " without a visible GPU" if hidden else ""
                problems.append(f"importing {module}{where} failed: {reason}")
    return problems


def _import_failure(module: str, hidden: bool) -> str | None:
    """None, or the last line of what the import said (in a process of its own)."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})}
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or ["no message"])[-1]


if __name__ == "__main__":
    importlib.import_module("verl")
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
