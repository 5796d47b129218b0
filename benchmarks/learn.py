"""Does the tiny scale learn? Three training seeds, each on test worlds that nothing was tuned on.

    python benchmarks/learn.py [--seeds 3] [--first-world 9001] [--home FOLDER]

Prints mean and 95 % t-interval over the seeds of each gap in macro avg@4, strict and flexible.
A gap that is missed is printed as missed; nothing is adjusted.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from scipy import stats

from moopd.evaluation.results import Results, read_results
from tasks.home import ROOT

GAPS = (
    ("cmas_rl", "cmas_base", 15.0),
    ("multiagent_opd", "hmas_base", 10.0),
    ("multiagent_opd_last", "opd_no_searcher_loss", 0.0),
    ("multiagent_opd_last", "opd_base_teacher", 0.0),
    ("multiagent_opd_last", "opd_outcome_searcher", None),
    ("multiagent_opd", "cmas_rl", None),
    ("multiagent_opd", "prompted_critic", None),
)
"""(row, compared with, wanted gap in points or None where none is wished for)."""


def main() -> int:
    options = _options()
    results = [
        run_seed(seed, options.first_world + seed, Path(options.home))
        for seed in range(options.seeds)
    ]
    console = Console(width=120)
    console.print(rows_table(results))
    console.print(gaps_table(results))
    return 0


def rows_table(results: Sequence[Results]) -> Table:
    """Macro avg@4 of every row on every seed; malformed turns should be at most 10 % for bases."""
    table = Table("row", *(f"seed {n}" for n in range(len(results))), "mean", "malformed turns, %")
    for system in results[0].systems:
        scores = [macro(one, system.name, "strict") for one in results]
        malformed = " ".join(f"{malformed_turns(one, system.name):.1f}" for one in results)
        mean = sum(scores) / len(scores)
        table.add_row(system.name, *(f"{s:.1f}" for s in scores), f"{mean:.1f}", malformed)
    return table


def gaps_table(results: Sequence[Results]) -> Table:
    """Mean and interval of each gap, and whether the wished-for one is there."""
    table = Table("gap in macro avg@4", "score", "mean", "95 % interval", "wanted", "met")
    for row, other, wanted in GAPS:
        for score in ("strict", "flexible"):
            gaps = [macro(r, row, score) - macro(r, other, score) for r in results]
            low, high = interval(gaps)
            mean = sum(gaps) / len(gaps)
            met = "" if wanted is None else ("yes" if mean > wanted else "missed")
            goal = "" if wanted is None else f"> {wanted:g}"
            table.add_row(f"{row} - {other}", score, f"{mean:+.1f}", f"[{low:+.1f}, {high:+.1f}]",
                          goal, met)  # fmt: skip
    return table


def run_seed(seed: int, world: int, home: Path) -> Results:
    """One pipeline run; cached where it was run before."""
    folder = home / f"seed{seed}"
    command = [
        sys.executable, "-m", "flows.cli", "--home", str(folder), "run", "--scale", "tiny",
        "--set", f"seed={seed}", "--set", f"data.world.seed={world}",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True)
    newest = max(
        (folder / "artifacts" / "statistics").glob("[!.]*/results.json"),
        key=lambda path: path.stat().st_mtime,
    )
    return read_results(newest)


def interval(values: list[float]) -> tuple[float, float]:
    """95 % t-interval of the mean over training seeds."""
    if len(values) < 2:
        return float("nan"), float("nan")
    mean, error = sum(values) / len(values), stats.sem(values)
    half = float(stats.t.ppf(0.975, len(values) - 1) * error)
    return mean - half, mean + half


def macro(results: Results, row: str, score: str) -> float:
    """Macro avg@4 of a row in percent."""
    scores = getattr(results.system(row), score)
    return float(scores["avg"].macro.value)


def malformed_turns(results: Results, row: str) -> float:
    """Percent of a row's turns that its parser refused."""
    system = results.system(row)
    refused = sum(n for kind, n in system.failures.items() if not kind.startswith("final_answer/"))
    return 100 * refused / (system.num_records * system.workload["calls"].macro.value)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-world", type=int, default=9001)
    parser.add_argument("--home", default=str(ROOT / "data" / "learn"))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
