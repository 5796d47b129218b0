"""The records file: one row per attempt, parquet or JSON lines (docs/records.md).

Records travel as one Arrow table in `SCHEMA`; `EvalRecord` is the same row as an object.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from moopd.types import EvalRecord

FORMAT_VERSION = "1"
REQUIRED = ("system", "question_id", "attempt", "output")
COUNTS = (
    "num_searches",
    "num_repeated_queries",
    "num_subtasks",
    "num_reports",
    "num_rounds",
    "num_steps",
    "num_calls",
    "input_tokens",
    "output_tokens",
)
NESTED = ("format_failures", "trace")
"""Objects in JSON lines, JSON text in parquet."""
PRIVATE_PREFIX = "x_"
"""Columns of others that start so are read over."""

SCHEMA = pa.schema(
    [
        pa.field("system", pa.string(), nullable=False),
        pa.field("run", pa.int64()),
        pa.field("question_id", pa.string(), nullable=False),
        pa.field("dataset", pa.string()),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("output", pa.string(), nullable=False),
        pa.field("stop", pa.string()),
        *(pa.field(name, pa.int64()) for name in COUNTS),
        pa.field("format_failures", pa.string()),
        pa.field("seed", pa.int64()),
        pa.field("protocol", pa.string()),
        pa.field("trace", pa.string()),
    ],
    metadata={"moopd_records": FORMAT_VERSION},
)


class RecordsError(ValueError):
    """Records that cannot be scored; `ids` are the questions or rows at fault."""

    def __init__(self, message: str, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids = tuple(ids)


# ---------------------------------------------------------------- objects and tables


def to_table(records: Iterable[EvalRecord]) -> pa.Table:
    """Records as a table, rows in their order."""
    return _table([record_to_row(record) for record in records])


def from_table(table: pa.Table) -> list[EvalRecord]:
    """Records of a complete table. Raises RecordsError where a column is empty in some row."""
    names = [item.name for item in fields(EvalRecord)]
    records = []
    for row in table.to_pylist():
        if missing := [name for name in names if row[name] is None]:
            raise RecordsError(
                f"record of question {row['question_id']!r} lacks {', '.join(missing)}; such a "
                "file can be scored but not turned into records of our own",
                [row["question_id"]],
            )
        row.update({name: json.loads(row[name]) for name in NESTED})
        records.append(EvalRecord(**row))
    return records


def record_to_row(record: EvalRecord) -> dict[str, Any]:
    """A record as a JSON-able mapping, nested columns as objects."""
    return {name: getattr(record, name) for name in SCHEMA.names}


def _table(rows: Sequence[dict[str, Any]]) -> pa.Table:
    columns = []
    for item in SCHEMA:
        values = [row.get(item.name) for row in rows]
        if item.name in NESTED:
            values = [None if v is None else canonical_json(v) for v in values]
        elif pa.types.is_integer(item.type):
            _check_whole(item.name, values)
        try:
            columns.append(pa.array(values, type=item.type))
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, UnicodeError) as error:
            raise RecordsError(f"column {item.name!r}: expected {item.type}: {error}") from None
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def _check_whole(name: str, values: Sequence[object]) -> None:
    # Arrow would cut 0.5 to 0 without a word.
    for row, value in enumerate(values, start=1):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise RecordsError(
                f"column {name!r}, row {row}: got {value!r}, expected a whole number",
                [f"row {row}"],
            )


def canonical_json(value: object) -> str:
    """JSON with sorted keys and no spaces: the same value gives the same text."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


# ---------------------------------------------------------------- files


def write_records(path: Path, records: Iterable[EvalRecord]) -> None:
    """Write parquet, rows sorted by system, run, question and attempt; replaced in one move."""
    order = [(key, "ascending") for key in ("system", "run", "question_id", "attempt")]
    table = to_table(records).sort_by(order)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        pq.write_table(table, part, compression="zstd")
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def read_table(path: Path) -> pa.Table:
    """Read .parquet, .jsonl or .jsonl.gz in `SCHEMA`; optional columns that lack are null.

    Raises RecordsError for half-written files, unknown or missing columns and wrong types.
    """
    if not path.is_file():
        raise RecordsError(f"{path}: no such file; expected .parquet, .jsonl or .jsonl.gz")
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        rows = [row for _, row in _json_rows(path)]
        try:
            table = _table(rows)
        except RecordsError as error:
            raise RecordsError(f"{path}: {error}", error.ids) from None
        return _checked(table, path)
    raise RecordsError(f"{path}: unknown ending; expected .parquet, .jsonl or .jsonl.gz")


def _read_parquet(path: Path) -> pa.Table:
    try:
        table = pq.ParquetFile(path).read()
    except (pa.ArrowInvalid, OSError) as error:
        raise RecordsError(
            f"{path}: no complete parquet file ({str(error).splitlines()[0]}); it was half written "
            "or damaged: write it again"
        ) from None
    _check_columns(table.schema.names, f"{path}")
    columns = []
    for item in SCHEMA:
        if item.name not in table.schema.names:
            columns.append(pa.nulls(table.num_rows, item.type))
            continue
        column = table[item.name]
        try:
            columns.append(column.cast(item.type))
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise RecordsError(
                f"{path}: column {item.name!r} is {column.type}, expected {item.type}: {error}"
            ) from None
    return _checked(_plain(columns), path)


def _plain(columns: Sequence[Any]) -> pa.Table:
    # The metadata of a foreign file stays behind; nulls in required columns are reported by row.
    loose = pa.schema([pa.field(item.name, item.type) for item in SCHEMA])
    return pa.Table.from_arrays(list(columns), schema=loose)


def _checked(table: pa.Table, path: Path) -> pa.Table:
    for name in REQUIRED:
        column = table[name].combine_chunks()
        if column.null_count:
            rows = [n + 1 for n, gone in enumerate(column.is_null().to_pylist()) if gone]
            raise RecordsError(
                f"{path}: column {name!r} is empty in {len(rows)} rows, first row {rows[0]}; "
                "expected a value in every row",
                [f"row {n}" for n in rows[:20]],
            )
    return table


def _check_columns(names: Iterable[str], where: str) -> None:
    found = list(names)
    if missing := [name for name in REQUIRED if name not in found]:
        raise RecordsError(f"{where}: lacks {', '.join(missing)}; got {', '.join(found)}")
    known = set(SCHEMA.names)
    if extra := [n for n in found if n not in known and not n.startswith(PRIVATE_PREFIX)]:
        raise RecordsError(
            f"{where}: unknown columns {', '.join(extra)}; known: {', '.join(SCHEMA.names)}; "
            f"name a column of your own {PRIVATE_PREFIX}..."
        )


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    last = "none"
    for number, line in enumerate(_lines(path), start=1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            cut = "" if line.endswith(b"\n") else "; the file ends in the middle of this record"
            raise RecordsError(
                f"{where}: no JSON ({error}){cut}; last complete record: {last}", [last]
            ) from None
        if not isinstance(row, dict):
            raise RecordsError(f"{where}: got {type(row).__name__}, expected an object")
        _check_columns(row, where)
        last = f"{row['question_id']} attempt {row['attempt']}"
        yield number, row


def _lines(path: Path) -> Iterator[bytes]:
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordsError(f"{path}: damaged or half-written gzip file ({error})") from None
