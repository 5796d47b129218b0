"""Readers of raw question rows: local files, FlashRAG folders, Hugging Face datasets.

Readers stream. A row that cannot be used becomes a `Removal` with its line number and the rest is
read; only a file that cannot be read at all raises.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from moopd.config import Section
from moopd.types import DATASETS

SPLITS = ("train", "dev", "test")
UNKNOWN = "?"
BLANK_LINE = "blank_line"
QUESTION_FILES = (".jsonl", ".jsonl.gz", ".parquet")


class DataError(ValueError):
    """Input that cannot be prepared; the message says got, expected, what to do."""


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as published; `line` counts from 1 (the row number in parquet and on the hub)."""

    source: str
    line: int
    id: str
    dataset: str
    split: str
    question: str
    answers: object
    support_ids: tuple[str, ...] = ()
    family: str = ""
    num_hops: int | None = None


@dataclass(frozen=True, slots=True)
class Removal:
    """A row that did not become a question of its own, and why.

    `dataset` and `split` are "?" where the row does not say; `detail` names the other row of a
    duplicate or an overlap, or what was got.
    """

    reason: str
    source: str
    line: int
    id: str | None = None
    dataset: str = UNKNOWN
    split: str = UNKNOWN
    detail: str = ""


class Columns(Section):
    """Where a layout keeps each field; a dot goes into a nested record."""

    id: str = "id"
    question: str = "question"
    answers: str = "answers"
    dataset: str = "dataset"
    split: str = "split"
    support_ids: str = "support_ids"
    type: str = "type"
    num_hops: str = "num_hops"


class Source(Section):
    """One row of configs/datasets.yaml: a published split and the part it plays here."""

    dataset: Literal["nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle"]
    split: Literal["train", "dev", "test"]
    hub: str
    """Hub name, or a builder of the `datasets` library (json, parquet) with `data_files`."""
    name: str | None = None
    """Configuration of the hub dataset; the sub-folder in a FlashRAG folder."""
    hub_split: str
    data_files: str | None = None
    rows: int | None = Field(None, ge=1)
    """Published number of rows, asserted on what was read."""
    sample: int | None = Field(None, ge=1)
    """Questions drawn after removals; None: all."""
    seed: int = 0
    columns: Columns = Columns()


def load_sources(path: Path) -> tuple[Source, ...]:
    """Read datasets.yaml. Raises DataError naming the row and the key."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    columns = tree.get("columns", {})
    sources = []
    for number, row in enumerate(tree["sources"], start=1):
        try:
            sources.append(Source(**{"hub": tree.get("hub"), "columns": columns, **row}))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise DataError(
                f"{path}, source {number}: {key}: {first['msg']} (got {first['input']!r})"
            ) from None
    return tuple(sources)


# ---------------------------------------------------------------- local files


def find_questions(folder: Path, stem: str) -> Path | None:
    """`folder/stem.jsonl`, `.jsonl.gz` or `.parquet`; None if absent. Two of them are an error."""
    found = [folder / f"{stem}{ending}" for ending in QUESTION_FILES]
    found = [path for path in found if path.is_file()]
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise DataError(f"{folder} has {names}; expected one of them: remove the others")
    return found[0] if found else None


def read_folder(folder: Path, sources: Iterable[Source] = ()) -> Iterator[RawRow | Removal]:
    """Rows of `folder/questions.*`, else of a FlashRAG copy `folder/NAME/SPLIT.*`.

    `sources` says which FlashRAG files play which part.
    """
    own = folder if folder.is_file() else find_questions(folder, "questions")
    if own is not None:
        yield from read_file(own, Columns())
        return
    num_found = 0
    for source in sources:
        path = find_questions(folder / (source.name or source.dataset), source.hub_split)
        if path is not None:
            num_found += 1
            yield from read_file(path, source.columns, source.dataset, source.split)
    if not num_found:
        endings = ", ".join(QUESTION_FILES)
        raise DataError(
            f"no questions in {folder}: expected questions.* or DATASET/SPLIT.* ({endings}); "
            "set data.path to a folder that has them"
        )


def read_file(
    path: Path, columns: Columns, dataset: str | None = None, split: str | None = None
) -> Iterator[RawRow | Removal]:
    """Rows of one jsonl, jsonl.gz or parquet file; `dataset` and `split` where rows lack them."""
    records = _parquet(path) if path.suffix == ".parquet" else _json_lines(path)
    where = f"{path.parent.name}/{path.name}" if dataset else path.name
    for line, record in records:
        if isinstance(record, _Bad):
            yield Removal(
                record.reason, where, line, None, dataset or UNKNOWN, split or UNKNOWN, record.got
            )
        else:
            yield to_row(record, where, line, columns, dataset, split)


@dataclass(frozen=True, slots=True)
class _Bad:
    reason: str
    got: str = ""


def _json_lines(path: Path) -> Iterator[tuple[int, object]]:
    line = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                yield line, _json_line(raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path} is damaged after line {line} ({error}); fetch it again") from error


def _json_line(raw: bytes) -> object:
    if not raw.strip():
        return _Bad(BLANK_LINE)
    try:
        return json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return _Bad("bad_encoding", repr(raw[:80]))
    except (ValueError, RecursionError) as error:
        return _Bad("bad_json", str(error)[:80])


def _parquet(path: Path) -> Iterator[tuple[int, object]]:
    # Imported here: callers that read JSON do not pay for arrow.
    import pyarrow
    import pyarrow.parquet

    line = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(batch_size=4096):
            for record in batch.to_pylist():
                line += 1
                yield line, record
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is no readable parquet file ({error}); fetch it again") from error


# ---------------------------------------------------------------- hub


def read_hub(source: Source) -> Iterator[RawRow | Removal]:
    """Rows of one split of a Hugging Face dataset (or of local files through the same loader)."""
    # Imported here: it takes seconds, and only hub sources need it.
    import datasets

    try:
        table = datasets.load_dataset(
            source.hub, source.name, data_files=source.data_files, split=source.hub_split
        )
    except Exception as error:
        # The library raises dozens of unrelated types; each means that the split did not load.
        cause = str(error).strip().splitlines()[:1] or [""]
        raise DataError(
            f"{source.hub} (configuration {source.name}, split {source.hub_split}) did not load: "
            f"{type(error).__name__}: {cause[0]}; check the name in configs/datasets.yaml and the "
            "network, or use a local copy (data.source: files)"
        ) from error
    where = "/".join(part for part in (source.hub, source.name, source.hub_split) if part)
    for line, record in enumerate(table, start=1):
        yield to_row(record, where, line, source.columns, source.dataset, source.split)


# ---------------------------------------------------------------- one row


def to_row(
    record: object,
    where: str,
    line: int,
    columns: Columns,
    dataset: str | None = None,
    split: str | None = None,
) -> RawRow | Removal:
    """The row, or the reason why it is malformed."""
    if not isinstance(record, Mapping):
        got = type(record).__name__
        return Removal(
            "not_an_object", where, line, None, dataset or UNKNOWN, split or UNKNOWN, got
        )
    own_dataset = dataset or _text(_field(record, columns.dataset)) or UNKNOWN
    own_split = split or _text(_field(record, columns.split)) or UNKNOWN
    row_id = _text(_field(record, columns.id))
    question = _field(record, columns.question)

    def bad(reason: str, got: object) -> Removal:
        return Removal(reason, where, line, row_id, own_dataset, own_split, repr(got)[:80])

    if own_dataset not in DATASETS:
        return bad("unknown_dataset", own_dataset)
    if own_split not in SPLITS:
        return bad("unknown_split", own_split)
    if question is None:
        return bad("missing_question", question)
    if not isinstance(question, str):
        return bad("question_not_text", question)
    kind = _text(_field(record, columns.type)) or ""
    return RawRow(
        source=where,
        line=line,
        id=_row_id(row_id, own_dataset, own_split, line, prefixed=dataset is not None),
        dataset=own_dataset,
        split=own_split,
        question=question,
        answers=_field(record, columns.answers, "golden_answers"),
        support_ids=_support(_field(record, columns.support_ids)),
        family=kind,
        num_hops=_num_hops(_field(record, columns.num_hops), kind),
    )


def _row_id(own: str | None, dataset: str, split: str, line: int, prefixed: bool) -> str:
    # FlashRAG counts rows per split ("test_0"), so the dataset must be part of the id.
    if own is None:
        return f"{dataset}-{split}-{line}"
    return f"{dataset}-{own}" if prefixed else own


def _field(record: Mapping[str, Any], column: str, fallback: str | None = None) -> object:
    value: object = record
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return record.get(fallback) if value is None and fallback else value


def _text(value: object) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        return None
    return str(value).strip() or None


def _support(value: object) -> tuple[str, ...]:
    return tuple(str(item) for item in value) if isinstance(value, (list, tuple)) else ()


def _num_hops(value: object, kind: str) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    # MuSiQue writes it into its type: "2hop", "3hop1".
    return int(kind[0]) if kind[:1].isdigit() and kind[1:4] == "hop" else None
