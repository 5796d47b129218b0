"""Kill the real process at seeded moments, run on, and compare with an undisturbed run.

    python benchmarks/fault.py [--kills 20] [--seed 0] [--system cmas_rl ...] [--home FOLDER]

Each kill is SIGKILL to the process group, at a random moment after the start. At the end every
artifact (weights, records, manifest, statistics) must have the bytes of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from tasks.home import ROOT


def main() -> int:
    options = _options()
    home = Path(options.home)
    shutil.rmtree(home, ignore_errors=True)
    systems = [part for name in options.system for part in ("--system", name)]
    started = time.monotonic()
    _run(home / "whole", systems)
    seconds = time.monotonic() - started
    rng = random.Random(options.seed)
    for number in range(options.kills):
        moment = rng.uniform(1.0, max(2.0, 2.0 * seconds / options.kills + 8.0))
        stage = kill_after(moment, home / "killed", systems)
        print(f"kill {number + 1:2d} after {moment:5.1f} s, in {stage}", flush=True)
    _run(home / "killed", systems)
    whole, killed = digests(home / "whole"), digests(home / "killed")
    different = sorted(name for name in whole if whole[name] != killed.get(name))
    print(f"{len(whole)} artifacts, {len(different)} different {different}")
    return 1 if different else 0


def kill_after(moment: float, home: Path, systems: list[str]) -> str:
    """Start a run, kill it after `moment` seconds (or let it end); the stages under way."""
    process = subprocess.Popen(
        _command(home, systems), cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        process.wait(timeout=moment)
        return "nothing: it had ended"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return under_way(home)


def under_way(home: Path) -> str:
    """Stages that the newest journal saw start and not end."""
    journals = sorted((home / "journal").glob("*.jsonl"))
    open_: dict[str, None] = {}
    for line in journals[-1].read_text().splitlines() if journals else []:
        event = json.loads(line)
        if event["event"] == "stage_started":
            open_[event["stage"]] = None
        elif event["event"] == "stage_finished":
            open_.pop(event["stage"], None)
    return ", ".join(open_) or "no stage"


def digests(home: Path) -> dict[str, str]:
    return {
        path.parent.parent.name: json.loads(path.read_text())["sha256"]
        for path in (home / "artifacts").glob("*/[!.]*/artifact.json")
    }


def _run(home: Path, systems: list[str]) -> None:
    subprocess.run(_command(home, systems), cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)  # fmt: skip


def _command(home: Path, systems: list[str]) -> list[str]:
    command = [sys.executable, "-m", "flows.cli", "--home", str(home), "run", "--scale", "smoke"]
    return [*command, *systems]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system", action="append", default=[])
    parser.add_argument("--home", default=str(ROOT / "data" / "fault"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
