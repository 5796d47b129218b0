"""Kill the real process at seeded points over all stages, and compare with an undisturbed run.

    python benchmarks/fault.py [--kills 20] [--seed 0] [--system cmas_rl ...] [--home FOLDER]

A point is a stage and a share of the time that the stage took undisturbed. Each kill is SIGKILL to
the process group. At the end the artifacts (weights, records, manifest, statistics, report) must
have the bytes of the undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tasks.home import ROOT

_PATIENCE_S = 600.0


def main() -> int:
    options = _options()
    home = Path(options.home)
    if home.exists():
        raise SystemExit(f"{home} exists, and the undisturbed run needs an empty home; remove it")
    chain = [part for name in options.system for part in ("--system", name)]
    return 1 if fault(home, chain, options.kills, options.seed) else 0


def fault(home: Path, chain: Sequence[str], kills: int, seed: int) -> list[str]:
    """Artifacts that differ from the undisturbed run's, after so many kills; prints each point."""
    _run(home / "whole", chain)
    for number, (stage, share, seconds) in enumerate(points(home / "whole", kills, seed)):
        hit = kill_in(stage, share * seconds, home / "killed", chain)
        said = "" if hit else " (done before it could be hit)"
        print(f"kill {number + 1:2d} in {stage} at {100 * share:.0f} %{said}", flush=True)
    _run(home / "killed", chain)
    whole, killed = digests(home / "whole"), digests(home / "killed")
    different = sorted(name for name in whole if whole[name] != killed.get(name))
    print(f"{len(whole)} artifacts, {len(different)} different {different}")
    lost = sum(event["event"] == "run_lost" for event in events(home / "killed"))
    print(f"{lost} runs marked as lost")
    return different


def points(home: Path, kills: int, seed: int) -> list[tuple[str, float, float]]:
    """(stage, share of its time, its seconds): every stage once before any twice, in order."""
    finished = [e for e in events(home) if e["event"] == "stage_finished"]
    seconds = {str(e["stage"]): float(e["seconds"]) for e in finished}
    rng = random.Random(seed)
    order = list(seconds)
    chosen: list[str] = []
    while len(chosen) < kills:
        chosen += rng.sample(order, min(len(order), kills - len(chosen)))
    chosen.sort(key=order.index)
    return [(stage, rng.random(), seconds[stage]) for stage in chosen]


def kill_in(stage: str, after_s: float, home: Path, chain: Sequence[str]) -> bool:
    """Start a run, kill it so long after the stage began; False when it ended before that."""
    seen = len(events(home))
    process = subprocess.Popen(
        _command(home, chain), cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while time.monotonic() < deadline and process.poll() is None:
            new = [e["event"] for e in events(home)[seen:] if e.get("stage") == stage]
            if "stage_cached" in new:
                return False
            if "stage_started" in new:
                time.sleep(after_s)
                return process.poll() is None
            time.sleep(0.02)
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def events(home: Path) -> list[dict[str, object]]:
    """Whole lines of all journals, oldest run first."""
    found = []
    for path in sorted((home / "journal").glob("*.jsonl")):
        text = path.read_text()
        lines = text[: text.rfind("\n") + 1].splitlines()
        found += [json.loads(line) for line in lines]
    return found


def digests(home: Path) -> dict[str, str]:
    return {
        path.parent.parent.name: json.loads(path.read_text())["sha256"]
        for path in (home / "artifacts").glob("*/[!.]*/artifact.json")
    }


def _run(home: Path, chain: Sequence[str]) -> None:
    subprocess.run(_command(home, chain), cwd=ROOT, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)  # fmt: skip


def _command(home: Path, chain: Sequence[str]) -> list[str]:
    command = [sys.executable, "-m", "flows.cli", "--home", str(home), "run", "--scale", "smoke"]
    return [*command, *chain]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--system", action="append", default=[])
    parser.add_argument("--home", default=str(ROOT / "data" / "fault"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
