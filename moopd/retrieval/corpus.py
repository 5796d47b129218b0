"""Passages from a file, streamed: jsonl, jsonl.gz, parquet, and the DPR layout of tsv."""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from moopd.types import Passage

_ID_KEYS = ("id", "_id", "doc_id")
_TEXT_KEYS = ("text", "contents")
_MAX_FIELD = 1 << 24


class CorpusError(ValueError):
    """A corpus that cannot be read; the message names file and line."""


@dataclass(frozen=True, slots=True)
class CorpusSurvey:
    """What one pass over a corpus tells: every passage is readable, how many, how large."""

    num_passages: int
    num_bytes: int
    """Size of the stored passages, in bytes."""
    sha256: str
    """Over the stored lines: the same passages in another file layout give the same digest."""


def find_corpus(path: Path) -> Path:
    """The corpus file itself, or the one `corpus.*` of a folder."""
    if not path.is_dir():
        return path
    found = sorted(file for file in path.glob("corpus.*") if _reader_of(file) is not None)
    if len(found) != 1:
        names = [file.name for file in found] or "none"
        raise CorpusError(f"{path}: got {names}, expected exactly one corpus.* ({_known()})")
    return found[0]


def read_passages(path: Path) -> Iterator[Passage]:
    """Stream the passages of a corpus file, or of the one corpus.* in a folder.

    Raises CorpusError with the line (parquet: the row) for anything that is no passage.
    """
    path = find_corpus(path)
    reader = _reader_of(path)
    if reader is None:
        raise CorpusError(f"{path}: got suffix {path.suffix!r}, expected one of {_known()}")
    if not path.is_file():
        raise CorpusError(f"{path}: no such corpus file; expected one of {_known()}")
    return reader(path)


def survey(path: Path) -> CorpusSurvey:
    """Read a whole corpus once, in constant memory. Raises CorpusError if it is empty."""
    digest = hashlib.sha256()
    num_passages = num_bytes = 0
    for passage in read_passages(path):
        line = to_line(passage)
        digest.update(line)
        num_bytes += len(line)
        num_passages += 1
    if num_passages == 0:
        raise CorpusError(f"{path}: got no passage, expected at least one")
    return CorpusSurvey(num_passages, num_bytes, digest.hexdigest())


def to_line(passage: Passage) -> bytes:
    """The stored form of a passage: one line of JSON."""
    row = {"id": passage.id, "title": passage.title, "text": passage.text}
    return json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def from_line(line: bytes) -> Passage:
    row = json.loads(line)
    return Passage(row["id"], row["title"], row["text"])


def indexed_text(passage: Passage) -> str:
    """What encoders and the lexical index see of a passage."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text


# ---------------------------------------------------------------- layouts


def _read_jsonl(path: Path) -> Iterator[Passage]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise CorpusError(f"{path}, line {number}: got no JSON ({error})") from None
        yield _passage(row, f"{path}, line {number}")


def _read_tsv(path: Path) -> Iterator[Passage]:
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.reader((line for _, line in _lines(path)), delimiter="\t")
    header = next(reader, [])
    if not {"id", "text"} <= set(header):
        raise CorpusError(
            f"{path}, line 1: got columns {header[:6]}, expected a header of id, text, title"
        )
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise CorpusError(f"{path}, line {reader.line_num}: {error}") from None
        if row is None:
            return
        where = f"{path}, line {reader.line_num}"
        if len(row) != len(header):
            raise CorpusError(f"{where}: got {len(row)} fields, expected {len(header)}")
        yield _passage(dict(zip(header, row, strict=True)), where)


def _read_parquet(path: Path) -> Iterator[Passage]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise CorpusError(f"{path}: not readable as parquet ({error})") from None
    wanted = [n for n in file.schema_arrow.names if n in (*_ID_KEYS, "title", *_TEXT_KEYS)]
    number = 0
    with file:
        for batch in file.iter_batches(batch_size=4096, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield _passage(row, f"{path}, row {number}")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    with _open(path) as stream:
        try:
            for number, raw in enumerate(stream, start=1):
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise CorpusError(f"{path}, line {number}: got no UTF-8 ({error})") from None
        except (EOFError, gzip.BadGzipFile) as error:
            raise CorpusError(f"{path}, after line {number}: damaged gzip ({error})") from None


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def _passage(row: Any, where: str) -> Passage:
    if not isinstance(row, Mapping):
        raise CorpusError(f"{where}: got {type(row).__name__}, expected an object with id and text")
    text = _first(row, _TEXT_KEYS)
    if not isinstance(text, str) or not text.strip():
        raise CorpusError(
            f"{where}: got a passage without text (keys: {sorted(map(str, row))}), expected a "
            "non-empty 'text' (or 'contents'); mend or remove the row"
        )
    identity = _first(row, _ID_KEYS)
    if isinstance(identity, bool) or not isinstance(identity, str | int) or identity == "":
        raise CorpusError(f"{where}: got id {identity!r}, expected a string or a whole number")
    title = row.get("title")
    if title is None and "text" not in row:
        title, text = split_contents(text)
    return Passage(str(identity), str(title or ""), text)


def split_contents(contents: str) -> tuple[str, str]:
    """(title, text) of a `contents` field whose first line is the title."""
    first, newline, rest = contents.partition("\n")
    return (first.strip().strip('"'), rest) if newline and rest.strip() else ("", contents)


def _first(row: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


_READERS: dict[str, Callable[[Path], Iterator[Passage]]] = {
    ".jsonl": _read_jsonl,
    ".jsonl.gz": _read_jsonl,
    ".tsv": _read_tsv,
    ".tsv.gz": _read_tsv,
    ".parquet": _read_parquet,
}


def _reader_of(path: Path) -> Callable[[Path], Iterator[Passage]] | None:
    return next((read for end, read in _READERS.items() if path.name.endswith(end)), None)


def _known() -> str:
    return ", ".join(_READERS)
