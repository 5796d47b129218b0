"""One stage in a process of its own: `python -m tasks.worker REQUEST.json`.

The parent stays free of torch, can cut a stage that overruns its deadline, and takes it down when
it dies itself. Plain progress lines go to stdout, metrics to the run's journal.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moopd.config import ConfigError, Scale
from moopd.systems import System
from moopd.tracking.journal import Journal
from moopd.types import ArtifactRef
from tasks.guard import end_with_parent
from tasks.home import Home

EXIT_CONFIG = 2


@dataclass(frozen=True)
class Request:
    """What a stage body gets. `out` is the empty temporary artifact, `work` survives a crash."""

    stage: str
    kind: str
    scale: Scale
    system: System | None
    systems: dict[str, System]
    row: str
    checkpoint: str
    run: int
    seed: int
    inputs: dict[str, ArtifactRef]
    teachers: dict[str, str]
    out: Path
    work: Path
    home: Path
    journal_run: str
    attempt: str

    def input(self, name: str) -> Path:
        return Path(self.inputs[name].path)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Metrics of a step into the journal, a short line for people."""
        Journal(Home(self.home).journal, self.journal_run).write(
            "metrics", stage=self.stage, attempt=self.attempt, step=step, values=metrics
        )
        shown = [
            f"{name.split('/')[-1]} {metrics[name]:.3f}"
            for name in (
                "dev/em",
                "train/em_any",
                "train/searches",
                "warm_start/loss",
                "critic/agreement",
                "critic/adequate",
            )
            if name in metrics
        ]
        self.say(f"step {step} {' '.join(shown)}")
        if metrics.get("dev/search_collapse"):
            self.say(f"ALARM at step {step}: workflows have stopped searching")

    def say(self, text: str) -> None:
        print(f"{self.stage}: {text}", flush=True)


def write_request(path: Path, request: Request) -> None:
    tree = {
        **{name: getattr(request, name) for name in _PLAIN},
        "scale": request.scale.model_dump(mode="json"),
        "system": request.system.model_dump(mode="json") if request.system else None,
        "systems": {name: s.model_dump(mode="json") for name, s in request.systems.items()},
        "inputs": {name: asdict(ref) for name, ref in request.inputs.items()},
        **{name: str(getattr(request, name)) for name in ("out", "work", "home")},
    }
    path.write_text(json.dumps(tree))


_PLAIN = (
    "stage", "kind", "row", "checkpoint", "run", "seed", "teachers", "journal_run", "attempt",
)  # fmt: skip


def read_request(path: Path) -> Request:
    tree: dict[str, Any] = json.loads(path.read_text())
    return Request(
        **{name: tree[name] for name in _PLAIN},
        scale=Scale(**tree["scale"]),
        system=System(**tree["system"]) if tree["system"] else None,
        systems={name: System(**row) for name, row in tree["systems"].items()},
        inputs={name: ArtifactRef(**ref) for name, ref in tree["inputs"].items()},
        out=Path(tree["out"]),
        work=Path(tree["work"]),
        home=Path(tree["home"]),
    )


def die_with_parent(parent: int) -> None:
    """End when the parent goes, which may be gone already."""
    end_with_parent()
    if os.getppid() != parent:
        os._exit(1)


def run_body(request: Request, body: Callable[[Request], None], error_file: Path) -> int:
    try:
        body(request)
    except ConfigError as error:
        error_file.write_text(str(error))
        return EXIT_CONFIG
    except Exception as error:
        error_file.write_text(f"{type(error).__name__}: {error}")
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    path, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from tasks.bodies import BODIES

    request = read_request(path)
    return run_body(request, BODIES[request.kind], path.with_suffix(".error"))


if __name__ == "__main__":
    sys.exit(main())
