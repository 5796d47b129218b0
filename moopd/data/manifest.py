"""From rows to the fixed questions of train, dev and test, and a manifest that accounts for every
row that was read (protocol: section 4 of arXiv 2610.23234)."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moopd.config import DataConfig
from moopd.data.clean import Candidate
from moopd.data.dedup import drop_overlap, leaks, merge_duplicates
from moopd.data.normalize import normalize_question
from moopd.data.sources import (
    BLANK_LINE,
    SPLITS,
    DataError,
    RawRow,
    Removal,
    Source,
    load_sources,
    read_folder,
    read_hub,
)
from moopd.data.splits import Ledger, published, resolve, select
from moopd.types import Question

DATASETS_YAML = Path(__file__).resolve().parents[2] / "configs" / "datasets.yaml"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class Count:
    """Rows of one published split: read = kept + removed + unused."""

    read: int
    kept: int
    removed: int
    unused: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What was read, kept and removed. Keys of counts are `dataset/split`."""

    sha256: dict[str, str]
    """Of the questions of each split, as written; `all` over the three."""
    questions: dict[str, tuple[str, ...]]
    """Question ids of each split, in order."""
    kept: dict[str, int]
    """By the split that a question serves here: development rows carved from train count as dev."""
    rows: dict[str, Count]
    """By the split in which a row was published."""
    reasons: dict[str, int]
    """Removals by reason; blank lines are listed and are no rows."""
    flags: dict[str, int]
    """Kept questions with a repair or a doubt: conflicting_answers, mojibake_repaired, ..."""
    unused: dict[str, dict[str, int]]
    """Good rows that the configuration does not ask for: not_trained, not_tested, no_support,
    not_sampled."""
    removals: tuple[Removal, ...]
    num_leaks: int = 0
    """Normalised questions in two splits: asserted 0. Says nothing on paraphrases."""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    splits: dict[str, tuple[Question, ...]]
    manifest: Manifest


# ---------------------------------------------------------------- preparation


def prepare(
    config: DataConfig, rows: Iterable[RawRow | Removal], seeds: Mapping[str, int] | None = None
) -> Prepared:
    """Clean, unite, separate and sample; `seeds` is the sampling seed of each dataset.

    Raises DataError when rows read differ from `expected_rows`, when a sample is larger than what
    is left, when a split is empty, or when a question leaks.
    """
    ledger = Ledger()
    resolved = resolve(config, rows, ledger)
    chosen = select(config, resolved, ledger, seeds or {})
    settings = config.model_dump(mode="json", exclude={"world", "path", "corpus"})
    return _prepared(chosen, ledger, settings)


# ---------------------------------------------------------------- manifest


def _prepared(
    chosen: Mapping[str, Sequence[Candidate]], ledger: Ledger, settings: dict[str, Any]
) -> Prepared:
    if found := leaks(chosen):
        pairs = ", ".join(f"{one} = {other}" for one, other in found[:5])
        raise DataError(f"{len(found)} questions are in two splits ({pairs}); this is a fault")
    splits = {name: tuple(row.question for row in rows) for name, rows in chosen.items()}
    digests = {name: _digest(_lines(questions)) for name, questions in splits.items()}
    digests["all"] = _digest(f"{name} {digest}\n" for name, digest in digests.items())
    manifest = Manifest(
        sha256=digests,
        questions={name: tuple(q.id for q in questions) for name, questions in splits.items()},
        kept=dict(
            Counter(f"{q.dataset}/{name}" for name, questions in splits.items() for q in questions)
        ),
        rows=_count(chosen, ledger),
        reasons=dict(Counter(removal.reason for removal in ledger.removals)),
        flags=_flags(chosen),
        unused={name: dict(reasons) for name, reasons in sorted(ledger.unused.items())},
        removals=tuple(ledger.removals),
        settings=settings,
    )
    return Prepared(splits, manifest)


def _count(chosen: Mapping[str, Sequence[Candidate]], ledger: Ledger) -> dict[str, Count]:
    kept = Counter(published(row) for rows in chosen.values() for row in rows)
    removed = Counter(
        f"{removal.dataset}/{removal.split}"
        for removal in ledger.removals
        if removal.reason != BLANK_LINE
    )
    counts = {}
    for name, read in sorted(ledger.read.items()):
        unused = sum(ledger.unused.get(name, Counter()).values())
        counts[name] = Count(read, kept[name], removed[name], unused)
        if read != kept[name] + removed[name] + unused:
            raise RuntimeError(f"{name}: {counts[name]} does not add up; a row was lost")
    return counts


def _flags(chosen: Mapping[str, Sequence[Candidate]]) -> dict[str, int]:
    flags = Counter(flag for rows in chosen.values() for row in rows for flag in row.flags)
    repeats = sum(len(rows) - len({row.key for row in rows}) for rows in chosen.values())
    return {**flags, **({"duplicate_kept": repeats} if repeats else {})}


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8"))
    return digest.hexdigest()


# ---------------------------------------------------------------- files


def prepare_files(
    config: DataConfig, folder: Path, out: Path, datasets_yaml: Path = DATASETS_YAML
) -> Manifest:
    """Read the configured source and write questions_{train,dev,test}.jsonl and manifest.json.

    `folder` holds the local files (source: files); the hub is read through the cache of the
    `datasets` library, with the published sizes of datasets.yaml where the config gives none.
    """
    if config.source == "world":
        raise DataError("data.source is world, which has no files; build it and write_prepared")
    sources = load_sources(datasets_yaml)
    seeds: dict[str, int] = {one.dataset: one.seed for one in sources if one.split == "test"}
    if config.source == "files":
        return _write(prepare(config, read_folder(folder, sources), seeds), out)
    config = with_published_sizes(config, sources)
    rows = (row for source in sources for row in read_hub(source))
    return _write(prepare(config, rows, seeds), out)


def with_published_sizes(config: DataConfig, sources: Iterable[Source]) -> DataConfig:
    """The config with row counts and test sizes of datasets.yaml where it has none of its own."""
    sources = tuple(sources)
    rows = {f"{one.dataset}/{one.split}": one.rows for one in sources if one.rows}
    sizes = {one.dataset: one.sample for one in sources if one.split == "test" and one.sample}
    return config.model_copy(
        update={
            "expected_rows": config.expected_rows or rows,
            "test_sizes": config.test_sizes or sizes,
        }
    )


def write_prepared(splits: Mapping[str, Sequence[Question]], out: Path) -> Manifest:
    """Built questions through the same duplicate, overlap and leak rules, then written.

    Raises DataError for an unknown split, a repeated id, or a question without text or answer.
    """
    if set(splits) != set(SPLITS):
        raise DataError(f"splits {sorted(splits)}; expected {', '.join(SPLITS)}")
    ledger = Ledger()
    candidates: dict[str, list[Candidate]] = {}
    seen: set[str] = set()
    for name in SPLITS:
        rows = [
            Candidate(question, name, normalize_question(question.text), "built", line)
            for line, question in enumerate(splits[name], start=1)
        ]
        for row in rows:
            _assert_built(row.question, seen)
            ledger.read[published(row)] += 1
        candidates[name], removals = merge_duplicates(rows)
        ledger.removals += removals
    chosen, removals = drop_overlap(candidates, "drop_test")
    ledger.removals += removals
    return _write(_prepared(chosen, ledger, {}), out)


def _assert_built(question: Question, seen: set[str]) -> None:
    if not question.text.strip() or not any(map(str.strip, question.answers)):
        raise DataError(f"built question {question.id!r} lacks text or answers: {question}")
    if question.id in seen:
        raise DataError(f"built question id {question.id!r} is there twice; ids must be unique")
    seen.add(question.id)


def _write(prepared: Prepared, out: Path) -> Manifest:
    out.mkdir(parents=True, exist_ok=True)
    for name, questions in prepared.splits.items():
        write_questions(questions, out / f"questions_{name}.jsonl")
    text = json.dumps(asdict(prepared.manifest), ensure_ascii=False, indent=1)
    _replace(out / MANIFEST, [text, "\n"])
    return prepared.manifest


def write_questions(questions: Iterable[Question], path: Path) -> None:
    """One JSON object a line, in the layout that `read_file` also reads; replaced in one move."""
    _replace(path, _lines(questions))


def read_questions(path: Path) -> list[Question]:
    """Questions that `write_questions` wrote. Raises DataError naming the line."""
    questions = []
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                questions.append(_question(json.loads(line)))
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{path}, line {number}: {type(error).__name__}: {error}; expected a question "
                    "as written by data preparation: prepare the data again"
                ) from error
    return questions


def read_manifest(path: Path) -> Manifest:
    """The manifest of a prepared folder. Raises DataError if it is none."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        tree["rows"] = {name: Count(**count) for name, count in tree["rows"].items()}
        tree["questions"] = {name: tuple(ids) for name, ids in tree["questions"].items()}
        tree["removals"] = tuple(Removal(**removal) for removal in tree["removals"])
        return Manifest(**tree)
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} is no manifest ({error}); prepare the data again") from error


def _lines(questions: Iterable[Question]) -> Iterator[str]:
    for question in questions:
        record = {
            "id": question.id,
            "dataset": question.dataset,
            "question": question.text,
            "answers": question.answers,
            "answer_type": question.answer_type,
            "type": question.family,
            "num_hops": question.num_hops,
            "support_ids": question.support_ids,
        }
        yield json.dumps(record, ensure_ascii=False) + "\n"


def _question(record: dict[str, Any]) -> Question:
    return Question(
        id=record["id"],
        dataset=record["dataset"],
        text=record["question"],
        answers=tuple(record["answers"]),
        answer_type=record["answer_type"],
        family=record["type"],
        num_hops=record["num_hops"],
        support_ids=tuple(record["support_ids"]),
    )


def _replace(path: Path, lines: Iterable[str]) -> None:
    # A reader never sees half a file, and a failed write leaves the old one.
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(lines)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
