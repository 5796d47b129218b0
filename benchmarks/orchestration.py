"""What orchestration costs: CPU seconds of a fully cached run, and its share of a cold run.

    python benchmarks/orchestration.py [--scale smoke] [--home FOLDER]

The first run fills the home. CPU seconds are those of the command and all its children. The share
is that of a cached run (which does nothing but orchestrate) in the cold one.
"""

from __future__ import annotations

import argparse
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from tasks.home import ROOT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", default=str(ROOT / "data" / "orchestration"))
    parser.add_argument("--scale", default="smoke")
    options = parser.parse_args()
    home, scale = Path(options.home), options.scale
    cold = cpu_of(home, scale)
    cached = cpu_of(home, scale)
    print(f"first run            {cold:6.1f} CPU s")
    print(f"cached, ephemeral    {cached:6.1f} CPU s   (at most 16)")
    server = subprocess.Popen([sys.executable, "-m", "flows.cli", "--home", str(home), "up"],
                              cwd=ROOT, stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        while not (home / "server.json").is_file() and server.poll() is None:
            time.sleep(0.5)
        served = cpu_of(home, scale)
        print(f"cached, with server  {served:6.1f} CPU s   (at most 6)")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    print(f"share of a cold run  {100 * cached / cold:6.1f} %       (under 2 at scale tiny)")
    return 0


def cpu_of(home: Path, scale: str) -> float:
    """CPU seconds of one `moopd run`, children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "flows.cli", "--home", str(home), "run", "--scale", scale],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


if __name__ == "__main__":
    sys.exit(main())
