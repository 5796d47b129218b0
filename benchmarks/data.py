"""Time and memory of data preparation: `python benchmarks/data.py FOLDER` (questions.* inside).

Exit status 1 if it takes over 20 s or 1 GiB.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from pathlib import Path

from moopd.config import DataConfig
from moopd.data.manifest import prepare_files

MAX_SECONDS = 20.0
MAX_GIB = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("../shared/data/real"))
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        manifest = prepare_files(DataConfig(source="files", clean="full"), folder, Path(out))
        seconds = time.perf_counter() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # kilobytes on Linux
    read = sum(count.read for count in manifest.rows.values())
    kept = sum(manifest.kept.values())
    print(
        f"{read} rows read, {kept} kept, {len(manifest.removals)} removed: "
        f"{seconds:.1f} s (limit {MAX_SECONDS:.0f}), {gib:.2f} GiB (limit {MAX_GIB:.0f})"
    )
    return int(seconds > MAX_SECONDS or gib > MAX_GIB)


if __name__ == "__main__":
    raise SystemExit(main())
