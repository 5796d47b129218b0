"""Checkpoints: a transformers folder (safetensors), the optimizer beside it, and the data position.

All randomness of training is derived from (seed, step), so the step is the whole RNG state. A
checkpoint is written to a temporary folder, flushed, renamed; a frozen teacher is a `CheckpointRef`
that is verified by content digest whenever it is loaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from moopd.types import CheckpointRef

_OPTIMIZER = "optimizer.safetensors"
_STATE = "training_state.json"


@dataclass(frozen=True, slots=True)
class TrainingState:
    """Where training stands after `step` updates."""

    step: int
    best_step: int = 0
    best_score: float = -1.0
    history: tuple[dict[str, float], ...] = field(default=())
    """Validation metrics so far, each with its `step`."""


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or not the one that was frozen."""


def weights_digest(folder: Path) -> str:
    """sha256 over the names and bytes of the folder's safetensors files, in name order."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no model*.safetensors; expected a saved policy")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def reference(system: str, step: int, folder: Path) -> CheckpointRef:
    return CheckpointRef(system, step, str(folder), weights_digest(folder))


def verify(checkpoint: CheckpointRef) -> Path:
    """The folder of a checkpoint whose weights are what its digest says."""
    folder = Path(checkpoint.path)
    got = weights_digest(folder) if folder.is_dir() else "nothing"
    if got != checkpoint.sha256:
        raise CheckpointError(
            f"checkpoint {checkpoint.system}, step {checkpoint.step}, at {folder}: got digest "
            f"{got}, expected {checkpoint.sha256}; run its training stage again"
        )
    return folder


def save_policy(model: Any, tokenizer: Any, folder: Path) -> None:
    """Model and tokenizer as a transformers folder, in place of what was there, atomically."""
    with _replacing(folder) as temporary:
        model.save_pretrained(temporary, safe_serialization=True)
        tokenizer.save_pretrained(temporary)


def save_step(
    folder: Path,
    model: Any,
    tokenizer: Any,
    optimizer: torch.optim.Optimizer,
    state: TrainingState,
) -> None:
    """Everything a resumed run needs, under `folder`, atomically."""
    with _replacing(folder) as temporary:
        model.save_pretrained(temporary, safe_serialization=True)
        tokenizer.save_pretrained(temporary)
        save_file(_optimizer_tensors(optimizer), temporary / _OPTIMIZER)
        (temporary / _STATE).write_text(json.dumps(asdict(state), sort_keys=True))


def load_state(folder: Path) -> TrainingState:
    values = json.loads((folder / _STATE).read_text())
    return TrainingState(**{**values, "history": tuple(values["history"])})


def load_optimizer(folder: Path, optimizer: torch.optim.Optimizer) -> None:
    """Restore moments and step counts of every parameter, in the optimizer's own order."""
    tensors = load_file(folder / _OPTIMIZER)
    for number, parameter in enumerate(_parameters(optimizer)):
        names = [name for name in tensors if name.split(".", 1)[0] == str(number)]
        optimizer.state[parameter] = {name.split(".", 1)[1]: tensors[name] for name in names}


def latest_step(work: Path) -> Path | None:
    """The newest complete `step_*` folder of a training run, if any."""
    steps = sorted(path for path in work.glob("step_*") if (path / _STATE).is_file())
    return steps[-1] if steps else None


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{number}.{name}": torch.as_tensor(value).detach().cpu().clone().contiguous()
        for number, parameter in enumerate(_parameters(optimizer))
        for name, value in optimizer.state.get(parameter, {}).items()
    }


class _replacing:
    """A temporary folder that takes the place of `folder` when the block ends well."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self._temporary

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            for file in self._temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as stream:
                        os.fsync(stream.fileno())
            shutil.rmtree(self._folder, ignore_errors=True)
            os.replace(self._temporary, self._folder)
        else:
            shutil.rmtree(self._temporary, ignore_errors=True)
