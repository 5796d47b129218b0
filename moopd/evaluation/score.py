"""`moopd score`: tables and paired differences from saved records alone, without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from moopd.config import StatisticsConfig
from moopd.data.clean import clean_row
from moopd.data.manifest import read_questions
from moopd.data.sources import Columns, DataError, Removal, read_file
from moopd.evaluation.analysis import RecordsInput, analyse
from moopd.evaluation.records import RecordsError, read_table
from moopd.evaluation.report import INTERVAL_NOTE, write_report
from moopd.evaluation.results import Provenance, Results, RunProvenance
from moopd.evaluation.scoring import FLEXIBLE_RULES, load_rules
from moopd.evaluation.tables import Cell, Table, Tables
from moopd.printable import printable
from moopd.systems import load_systems
from moopd.types import Question

SYSTEMS_YAML = Path(__file__).resolve().parents[2] / "configs" / "systems.yaml"
_STYLES = {"good": "green", "bad": "red", "open": "dim"}


def score_files(
    paths: Sequence[Path],
    questions_path: Path,
    *,
    statistics: StatisticsConfig | None = None,
    num_attempts: int = 4,
    report_folder: Path | None = None,
    rules_path: Path = FLEXIBLE_RULES,
    console: Console | None = None,
) -> Results:
    """Score record files against a questions file, print the tables, write a report if asked.

    Raises RecordsError (with the ids at fault) for records that cannot be scored.
    """
    if not paths:
        raise RecordsError("no record files; expected at least one .parquet or .jsonl file")
    inputs = [
        RecordsInput(read_table(path), RunProvenance(records=_digest(path))) for path in paths
    ]
    results = analyse(
        inputs,
        load_questions(questions_path),
        load_systems(SYSTEMS_YAML),
        statistics or StatisticsConfig(),
        provenance=Provenance(questions=_digest(questions_path)),
        num_attempts=num_attempts,
        rules=load_rules(rules_path),
    )
    print_results(results, console or Console())
    if report_folder is not None:
        write_report(results, report_folder)
    return results


def load_questions(path: Path) -> list[Question]:
    """Test questions as data preparation writes them, or any layout with id, question, answers.

    Raises RecordsError naming the lines that are no question.
    """
    if not path.is_file():
        raise RecordsError(f"{path}: no such file; expected the test questions (.jsonl, .parquet)")
    if path.suffix == ".jsonl":
        try:
            return read_questions(path)
        except (DataError, UnicodeDecodeError, RecursionError):
            # Not our own layout: the reader below takes any and names what it cannot take.
            pass
    rows = [
        row if isinstance(row, Removal) else clean_row(row, "malformed")
        for row in read_file(path, Columns(), split="test")
    ]
    bad = [row for row in rows if isinstance(row, Removal)]
    if bad:
        first = bad[0]
        raise RecordsError(
            f"{path}: {len(bad)} rows are no question, first line {first.line}: {first.reason} "
            f"{first.detail}",
            [f"line {row.line}" for row in bad],
        )
    return [row.question for row in rows if not isinstance(row, Removal)]


def print_results(results: Results, console: Console) -> None:
    """The main table and the paired differences, for a terminal or a log."""
    tables = Tables(results)
    console.print(rich_table(tables.main(), "Results"))
    if results.differences:
        console.print(rich_table(tables.differences(), "Paired differences"))
    runs = tables.runs()
    if runs.rows:
        console.print(rich_table(runs, "Training runs"))
    if results.caution:
        console.print(results.caution, style="yellow")
    confidence = f"{100 * results.confidence:g} %"
    console.print(INTERVAL_NOTE.format(confidence=confidence, draws=results.num_draws), style="dim")


def rich_table(table: Table, title: str) -> RichTable:
    """A report table for the terminal."""
    made = RichTable(title=title, title_justify="left", caption=table.note, caption_justify="left")
    for place, name in enumerate(table.header):
        made.add_column(name, justify="left" if place == 0 else "right")
    for row in table.rows:
        made.add_row(*(_shown(cell) for cell in row))
    return made


def _shown(cell: Cell) -> str:
    style = _STYLES.get(cell.mark)
    text = escape(printable(cell.text))
    small = [cell.interval, f"paper {cell.paper}" if cell.paper else "", *cell.notes]
    lines = [f"[{style}]{text}[/{style}]" if style else text]
    return "\n".join([*lines, *(f"[dim]{escape(line)}[/dim]" for line in small if line)])


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
