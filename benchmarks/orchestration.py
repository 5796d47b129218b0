"""What orchestration costs: CPU seconds of a fully cached run, with and without a server.

    python benchmarks/orchestration.py [--home FOLDER]

The first run fills the home at scale smoke. CPU seconds are those of the command and its children.
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
    home = Path(parser.parse_args().home)
    cold = cpu_of(home)
    print(f"cold run             {cold:6.1f} CPU s")
    print(f"cached, ephemeral    {cpu_of(home):6.1f} CPU s   (at most 16)")
    server = subprocess.Popen([sys.executable, "-m", "flows.cli", "--home", str(home), "up"],
                              cwd=ROOT, stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        while not (home / "server.json").is_file():
            time.sleep(0.5)
        cpu_of(home)
        print(f"cached, with server  {cpu_of(home):6.1f} CPU s   (at most 6)")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    return 0


def cpu_of(home: Path) -> float:
    """CPU seconds of one `moopd run --scale smoke`, children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "flows.cli", "--home", str(home), "run", "--scale", "smoke"],
        cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


if __name__ == "__main__":
    sys.exit(main())
