"""What one verl run is: a JSON file that every process of verl's reads. No torch, no verl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from moopd.config import (
    ConfigError,
    CriticConfig,
    SamplingConfig,
    Section,
    TrainingConfig,
    WorkflowConfig,
)
from moopd.systems import System, TrainRow

VERL_VERSION = "0.9.1"
TRAINER_NAME = "moopd_sync"
AGENT_NAME = "moopd"
PLUGIN_MODULE = "moopd.trainers.verl_plugin.register"
RUN_FILE = "run.json"
LOADED_FOLDER = "loaded"
"""Each process that runs our code leaves a file here: the proof that the plug-in is in place."""
VALIDATION_FILE = "validation.jsonl"


class VerlRun(Section):
    """Stage, numbers and places of one run; written by the launcher, frozen while it runs."""

    system: System
    seed: int
    num_steps: int
    work: str
    """Absolute folder that holds this file, the checkpoints and the proofs."""
    training: TrainingConfig
    workflow: WorkflowConfig
    evaluation_sampling: SamplingConfig
    critic: CriticConfig = CriticConfig()
    prompt_style: Literal["compact", "chat"] = "chat"
    top_k: int = 3
    retrieval_url: str
    max_retrieval_error_share: float = 0.01
    teachers: dict[str, str] = Field(default_factory=dict)
    """Teacher name -> transformers folder whose digest the launcher has verified."""
    call_timeout_s: float = 600.0
    """A call to the rollout server that takes longer ends its workflow as an engine failure."""
    keep_rows: bool = False

    @property
    def row(self) -> TrainRow:
        if self.system.train is None:
            raise ConfigError(f"system {self.system.name} is not trained; nothing to do")
        return self.system.train

    @property
    def folder(self) -> Path:
        return Path(self.work)

    @property
    def reference_teacher(self) -> str | None:
        """The teacher in verl's reference model: it serves the KL, and OPD where both agree."""
        return self.row.kl_teacher or self.row.opd_teacher

    @property
    def second_teacher(self) -> str | None:
        """The OPD teacher where it is another than the KL teacher (base-model teacher row)."""
        opd = self.row.opd_teacher
        return opd if opd is not None and opd != self.reference_teacher else None

    def write(self) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / RUN_FILE
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=1), encoding="utf-8")
        return path

    def leave_proof(self, component: str, details: dict[str, str | int]) -> None:
        """Say on disk that `component` runs our code."""
        folder = self.folder / LOADED_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{component}.json").write_text(json.dumps(details, sort_keys=True))


def load_run(path: str | Path) -> VerlRun:
    """Read a run file. Raises ConfigError when it is missing or not one."""
    try:
        return VerlRun(**json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise ConfigError(
            f"{path}: got no readable run file ({error}); expected the one that the launcher "
            "writes, so start verl through moopd"
        ) from None
