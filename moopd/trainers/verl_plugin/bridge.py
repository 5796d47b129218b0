"""verl checkpoint <-> transformers folder with a digest.

verl saves the policy as a transformers folder beside its shards; this turns it into a
`CheckpointRef` that evaluation, `moopd ask` and a later stage load like any other. The way
back is the same folder: verl starts from it as its model path, with fresh optimizer state.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from moopd.config import ConfigError
from moopd.trainers.checkpoints import CheckpointError, reference, verify
from moopd.trainers.verl_plugin.validation import CHECKPOINTS, policy_folder
from moopd.types import CheckpointRef

_LATEST = "latest_checkpointed_iteration.txt"


def latest_step(work: Path) -> int:
    """Last completely saved step of a verl run; 0 if there is none."""
    tracker = work / CHECKPOINTS / _LATEST
    try:
        return int(tracker.read_text())
    except FileNotFoundError:
        return 0
    except ValueError:
        raise CheckpointError(
            f"{tracker}: got {tracker.read_text()[:40]!r}, expected a step number; write the "
            "number of the newest complete global_step_* folder into it"
        ) from None


def drop_other_steps(work: Path, step: int) -> None:
    """Remove what a killed run left: a half-written later step, and earlier ones that a new
    process of verl no longer knows and would never rotate."""
    for folder in (work / CHECKPOINTS).glob("global_step_*"):
        if folder.name != f"global_step_{step}":
            shutil.rmtree(folder)


def world_size(work: Path, step: int) -> int:
    """Number of training processes that wrote a checkpoint: only as many can read it."""
    path = work / CHECKPOINTS / f"global_step_{step}" / "actor" / "fsdp_config.json"
    return int(json.loads(path.read_text())["world_size"])


def freeze_step(work: Path, system: str, step: int, name: str) -> CheckpointRef:
    """Link the policy of a saved step into `work/name` and digest it."""
    source = policy_folder(work, step)
    if not any(source.glob("model*.safetensors")):
        raise CheckpointError(
            f"{source}: got no model*.safetensors, expected hf_model among verl's saved contents"
        )
    return freeze_folder(source, work / name, system, step)


def freeze_folder(source: Path, target: Path, system: str, step: int) -> CheckpointRef:
    """Hard-link every file of `source` into `target` (in place of what is there); a reference."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file in source.iterdir():
        os.link(file, temporary / file.name)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    return reference(system, step, target)


def start_folder(checkpoint: CheckpointRef, student: CheckpointRef | None = None) -> str:
    """Folder of a verified checkpoint for verl to load; its vocabulary must be the student's."""
    folder = verify(checkpoint)
    if student is not None:
        check_same_vocabulary(Path(student.path), folder)
    return str(folder.resolve())


def check_same_vocabulary(student: Path, teacher: Path) -> None:
    """Raises ConfigError unless both folders map the same tokens to the same ids."""
    for what, read in (("vocabulary size", _vocab_size), ("token ids", _token_ids)):
        if read(student) != read(teacher):
            raise ConfigError(
                f"{what} of {teacher} differ from those of {student}; a teacher must share the "
                "student's vocabulary, so take one trained from the same base"
            )


def _vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _token_ids(folder: Path) -> Any:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: got no file, expected the tokenizer beside the weights")
    content = json.loads(path.read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
    return content["model"].get("vocab"), added
