"""`moopd compare`: rows of the newest results side by side, with their paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moopd.evaluation.results import BySet, Difference, Estimate, Results, read_results
from moopd.printable import printable


def print_comparison(path: Path, rows: Sequence[str], metric: str) -> None:
    """Raises ValueError for a row or a metric that the results do not have."""
    results = read_results(path)
    known = [system.name for system in results.systems]
    chosen = list(rows) or known
    for name in chosen:
        if name not in known:
            raise ValueError(f"no row {name!r} in the newest results; known: {', '.join(known)}")
    console = Console()
    console.print(_scores(results, chosen, metric))
    pairs = [
        difference
        for difference in results.differences
        if difference.metric == metric and {difference.first, difference.second} <= set(chosen)
    ]
    if pairs:
        console.print(_differences(results, pairs))


def _scores(results: Results, rows: Sequence[str], metric: str) -> Table:
    table = Table("system", *results.sets, "macro", title=f"{metric}, {results.scale}")
    for name in rows:
        strict = results.system(name).strict
        if metric not in strict:
            raise ValueError(f"no metric {metric!r}; known: {', '.join(strict)}")
        table.add_row(Text(printable(results.title(name))), *_cells(strict[metric], results.sets))
    return table


def _cells(scores: BySet, sets: Sequence[str] | dict[str, int]) -> list[str]:
    values = [f"{scores.sets[name].value:.1f}" for name in sets]
    return [*values, _interval(scores.macro)]


def _differences(results: Results, pairs: Sequence[Difference]) -> Table:
    table = Table("difference", "macro", "sets won", title="paired, same questions and draws")
    for pair in pairs:
        name = f"{results.title(pair.first)} - {results.title(pair.second)}"
        table.add_row(Text(printable(name)), _interval(pair.macro), str(pair.num_wins))
    return table


def _interval(estimate: Estimate) -> str:
    return f"{estimate.value:.1f} [{estimate.low:.1f}, {estimate.high:.1f}]"
