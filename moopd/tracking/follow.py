"""Follows the journal: `python -m moopd.tracking.follow MLFLOW_FOLDER JOURNAL_FOLDER`.

Each line on stdin asks for a sync; several that wait are one. At the end of stdin the rest is taken
over and the process ends: status 0 when MLflow has everything, else 1 and one line on stderr.
"""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

_IDLE_S = 20.0
"""Metrics of a stage under way show up this often."""


def main() -> int:
    os.nice(5)
    folder, journals = Path(sys.argv[1]), Path(sys.argv[2])
    problem = ""
    asked = True
    mirror = None
    while asked:
        asked = _wait()
        try:
            from moopd.tracking.mlflow_mirror import Mirror

            mirror = mirror or Mirror(folder)
            mirror.sync(journals)
            problem = ""
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


def _wait() -> bool:
    """Wait for a request, or a while; False at the end of stdin."""
    ready, _, _ = select.select([0], [], [], _IDLE_S)
    return not ready or bool(os.read(0, 4096))


if __name__ == "__main__":
    sys.exit(main())
