"""Finished records while an evaluation runs: appended one line each, compacted at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from moopd.evaluation.records import RecordsError, canonical_json, record_to_row
from moopd.types import EvalRecord

Key = tuple[str, int]
"""(question id, attempt)."""


class Journal:
    """Append-only JSON lines. What a crash cut off at the end is dropped, the rest is kept."""

    def __init__(self, path: Path, protocol: str) -> None:
        """Open or resume. Raises RecordsError where `path` was written under another protocol."""
        self._path = path
        self._protocol = protocol
        self.finished: dict[Key, EvalRecord] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._load()
        self._file = path.open("ab")

    def append(self, record: EvalRecord) -> None:
        """Keep one finished record; it survives the end of this process."""
        line = canonical_json(record_to_row(record)) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        self.finished[(record.question_id, record.attempt)] = record

    def forget(self, keys: Collection[Key]) -> None:
        """Drop records that must be run again; the file is rewritten in one move."""
        kept = {key: record for key, record in self.finished.items() if key not in keys}
        part = self._path.with_name(f".{self._path.name}.part")
        with part.open("wb") as file:
            for record in kept.values():
                file.write((canonical_json(record_to_row(record)) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        part.replace(self._path)
        self.finished = kept
        self._file = self._path.open("ab")

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _load(self) -> None:
        if not self._path.exists():
            return
        data = self._path.read_bytes()
        end = data.rfind(b"\n") + 1
        if end < len(data):
            os.truncate(self._path, end)
        for number, line in enumerate(data[:end].splitlines(), start=1):
            try:
                record = EvalRecord(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise RecordsError(
                    f"{self._path}, line {number}: no record ({error}); move the file away to "
                    "start over"
                ) from None
            if record.protocol != self._protocol:
                raise RecordsError(
                    f"{self._path}: written under protocol {record.protocol[:12]!r}, expected "
                    f"{self._protocol[:12]!r}; move the file away to start over",
                    [record.question_id],
                )
            self.finished[(record.question_id, record.attempt)] = record
