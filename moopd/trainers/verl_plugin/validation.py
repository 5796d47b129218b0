"""What development scores do to checkpoints: a journal, and the best policy kept as hard links.

verl rotates its checkpoints; the best one must outlive that without another copy of its weights.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from moopd.trainers.verl_plugin.spec import VALIDATION_FILE

CHECKPOINTS = "checkpoints"
SCORE = "dev/em"


def policy_folder(work: Path, step: int) -> Path:
    """Where verl writes the transformers folder of a step."""
    return work / CHECKPOINTS / f"global_step_{step}" / "actor" / "huggingface"


def best_folder(work: Path, step: int) -> Path:
    return work / f"best_{step:06d}"


def validations(work: Path) -> list[dict[str, float]]:
    """Development metrics so far, each with its `step`; a step validated twice counts once."""
    path = work / VALIDATION_FILE
    if not path.is_file():
        return []
    by_step: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the last line of a process that was killed while it wrote
        by_step[int(entry["step"])] = entry
    return [by_step[step] for step in sorted(by_step)]


def best_step(work: Path) -> int | None:
    """Step of the highest development EM, the earlier one where equal; step 0 is no candidate."""
    trained = [entry for entry in validations(work) if entry["step"] > 0]
    if not trained:
        return None
    return int(max(trained, key=lambda entry: (entry[SCORE], -entry["step"]))["step"])


def record_validation(work: Path, step: int, metrics: dict[str, float]) -> None:
    """Append to the journal, and keep this step's policy if it is the best so far."""
    with (work / VALIDATION_FILE).open("a", encoding="utf-8") as journal:
        journal.write(json.dumps({"step": step, **metrics}) + "\n")
        journal.flush()
        os.fsync(journal.fileno())
    if step > 0 and best_step(work) == step:
        keep_best(work, step)


def keep_best(work: Path, step: int) -> None:
    """Link the policy of `step` into `best_*` and drop what it replaces."""
    source, target = policy_folder(work, step), best_folder(work, step)
    if not any(source.glob("model*.safetensors")):
        raise FileNotFoundError(
            f"{source}: got no model*.safetensors, expected the policy of validated step {step}; "
            "every validated step must be saved, with hf_model among its contents"
        )
    temporary = work / f".best.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    for file in source.iterdir():
        os.link(file, temporary / file.name)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(temporary, target)
    for other in work.glob("best_*"):
        if other != target:
            shutil.rmtree(other)
