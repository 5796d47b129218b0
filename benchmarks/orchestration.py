"""What a run costs: time and memory of a cold one, CPU seconds of a cached one, and their ratio.

    python benchmarks/orchestration.py [--scale smoke] [--home FOLDER] [--set KEY=VALUE ...]

The first run fills an empty home. CPU seconds are those of the command and all its children. The
share is that of a cached run (which does nothing but orchestrate) in the cold one. Memory is the
largest sum over the command and all its descendants, each shared page counted once (PSS), looked
at every two seconds.
"""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tasks.home import ROOT

_LOOK_S = 2.0


@dataclass(frozen=True)
class Cost:
    """Of one command with everything it started."""

    wall_s: float
    cpu_s: float
    peak_gib: float

    def __str__(self) -> str:
        return f"{self.cpu_s:8.1f} CPU s {self.wall_s:8.1f} s {self.peak_gib:6.2f} GiB"


def main() -> int:
    options = _options()
    home = Path(options.home)
    if home.exists():
        raise SystemExit(f"{home} exists, and a cold run needs an empty home; remove it first")
    run = ["run", "--scale", options.scale, *(f"--set={value}" for value in options.set)]
    cold = cost_of(home, run)
    print(f"cold run             {cold}", flush=True)
    cached = cost_of(home, run)
    print(f"cached, ephemeral    {cached}   (at most 16 CPU s)", flush=True)
    server = subprocess.Popen([sys.executable, "-m", "flows.cli", "--home", str(home), "up"],
                              cwd=ROOT, stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        while not (home / "server.json").is_file() and server.poll() is None:
            time.sleep(0.5)
        print(f"cached, with server  {cost_of(home, run)}   (at most 6 CPU s)")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    share = 100 * cached.cpu_s / cold.cpu_s
    print(f"share of a cold run  {share:8.1f} %       (under 2 at scale tiny)")
    return 0


def cost_of(home: Path, run: list[str]) -> Cost:
    """One `moopd` command; its output is added to `run.log` in the home."""
    home.mkdir(parents=True, exist_ok=True)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    peak = 0
    with (home / "run.log").open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "--home", str(home), *run],
            cwd=ROOT, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while process.poll() is None:
            peak = max(peak, memory_of(process.pid))
            time.sleep(_LOOK_S)
    if process.returncode:
        raise SystemExit(f"the run ended with exit code {process.returncode}; see {home}/run.log")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return Cost(time.monotonic() - started, cpu, peak / 2**30)


def memory_of(pid: int) -> int:
    """Bytes of a process and its descendants; 0 for those that ended meanwhile."""
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            try:
                total += process.memory_full_info().pss
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
    except psutil.NoSuchProcess:
        pass
    return total


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", default=str(ROOT / "data" / "orchestration"))
    parser.add_argument("--scale", default="smoke")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
