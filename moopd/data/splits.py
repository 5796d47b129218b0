"""Which usable row serves which split: every row that was read ends in a split, among the removals
or among the unused, and the ledger knows which."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moopd.config import DataConfig
from moopd.data.clean import Candidate, clean_row
from moopd.data.dedup import drop_overlap, merge_duplicates, remove
from moopd.data.sources import BLANK_LINE, SPLITS, DataError, RawRow, Removal
from moopd.types import DATASETS


@dataclass(slots=True)
class Ledger:
    """Where every row went, while it is decided."""

    read: Counter[str] = field(default_factory=Counter)
    removals: list[Removal] = field(default_factory=list)
    unused: dict[str, Counter[str]] = field(default_factory=dict)

    def set_aside(self, rows: Iterable[Candidate], reason: str) -> None:
        for row in rows:
            self.unused.setdefault(published(row), Counter())[reason] += 1


def published(row: Candidate) -> str:
    """`dataset/split` under which a row was published."""
    return f"{row.question.dataset}/{row.split}"


def resolve(
    config: DataConfig, rows: Iterable[RawRow | Removal], ledger: Ledger
) -> dict[str, list[Candidate]]:
    """All usable questions of each split: clean, each once (`clean: full`), none in two splits."""
    splits = _clean(config, rows, ledger)
    _assert_expected(config.expected_rows, ledger.read)
    _set_aside_unwanted(config, splits, ledger)
    if config.clean == "full":
        for name in SPLITS:
            splits[name], removals = merge_duplicates(splits[name])
            ledger.removals += removals
    splits, removals = drop_overlap(splits, config.overlap)
    ledger.removals += removals
    return splits


def _clean(
    config: DataConfig, rows: Iterable[RawRow | Removal], ledger: Ledger
) -> dict[str, list[Candidate]]:
    splits: dict[str, list[Candidate]] = {name: [] for name in SPLITS}
    places: dict[str, str] = {}
    for row in rows:
        if not (isinstance(row, Removal) and row.reason == BLANK_LINE):
            ledger.read[f"{row.dataset}/{row.split}"] += 1
        clean = clean_row(row, config.clean) if isinstance(row, RawRow) else row
        if isinstance(clean, Removal):
            ledger.removals.append(clean)
            continue
        first = places.get(clean.question.id)
        if first is None:
            places[clean.question.id] = f"{clean.source}:{clean.line}"
            splits[clean.split].append(clean)
        else:
            ledger.removals.append(remove(clean, "duplicate_id", first))
    return splits


def _assert_expected(expected: Mapping[str, int], read: Mapping[str, int]) -> None:
    wrong = [
        f"{name}: read {read.get(name, 0)} rows, expected {number}"
        for name, number in expected.items()
        if read.get(name, 0) != number
    ]
    if wrong:
        raise DataError(
            f"{'; '.join(wrong)}; fetch the published version again, or correct "
            "data.expected_rows if another version is wanted"
        )


def _set_aside_unwanted(
    config: DataConfig, splits: dict[str, list[Candidate]], ledger: Ledger
) -> None:
    for name, known in (
        ("data.train_datasets", config.train_datasets),
        ("data.test_sizes", config.test_sizes),
    ):
        if unknown := [dataset for dataset in known if dataset not in DATASETS]:
            raise DataError(f"{name}: unknown {unknown}; known: {', '.join(DATASETS)}")

    def keep(split: str, wanted: Iterable[Candidate], reason: str) -> None:
        ids = {row.question.id for row in wanted}
        ledger.set_aside((row for row in splits[split] if row.question.id not in ids), reason)
        splits[split] = [row for row in splits[split] if row.question.id in ids]

    keep(
        "train",
        [row for row in splits["train"] if row.question.dataset in config.train_datasets],
        "not_trained",
    )
    if config.test_sizes:
        keep(
            "test",
            [row for row in splits["test"] if row.question.dataset in config.test_sizes],
            "not_tested",
        )
    if config.require_support:
        for split in SPLITS:
            keep(split, [row for row in splits[split] if row.question.support_ids], "no_support")


# ---------------------------------------------------------------- samples


def select(
    config: DataConfig,
    splits: dict[str, list[Candidate]],
    ledger: Ledger,
    seeds: Mapping[str, int],
) -> dict[str, list[Candidate]]:
    """Seeded samples: test per dataset, dev from its own rows and then from train, never from test.

    `seeds` is one number per dataset. Raises DataError when more is asked than is left.
    """

    def draw(rows: Sequence[Candidate], size: int) -> list[Candidate]:
        # The smallest digests: the same rows whatever the order of the file.
        def rank(row: Candidate) -> bytes:
            salt = f"{config.sample_seed}/{seeds.get(row.question.dataset, 0)}/{row.question.id}"
            return hashlib.sha256(salt.encode()).digest()

        taken = {row.question.id for row in sorted(rows, key=rank)[:size]}
        return [row for row in rows if row.question.id in taken]

    test: list[Candidate] = []
    for dataset, rows in _by_dataset(splits["test"]).items():
        test += draw(rows, config.test_sizes.get(dataset, len(rows)))
    _assert_sizes(config.test_sizes, test)

    dev: list[Candidate] = []
    for dataset, size in _shares(splits["dev"], config.dev_size).items():
        dev += draw(_by_dataset(splits["dev"])[dataset], size)
    train = splits["train"]
    if len(dev) < config.dev_size:
        # A key that train repeats (clean: malformed) would leak if one of its rows went to dev.
        repeated = Counter(row.key for row in train)
        single = [row for row in train if repeated[row.key] == 1]
        for dataset, size in _shares(single, config.dev_size - len(dev)).items():
            dev += draw(_by_dataset(single)[dataset], size)
    taken = {row.question.id for row in dev}
    pool = [row for row in train if row.question.id not in taken]
    train = draw(pool, len(pool) if config.train_size is None else config.train_size)
    _assert_filled(config, len(pool), len(dev), len(test))

    chosen = {"train": train, "dev": dev, "test": test}
    used = {row.question.id for rows in chosen.values() for row in rows}
    for rows in splits.values():
        ledger.set_aside((row for row in rows if row.question.id not in used), "not_sampled")
    return chosen


def _by_dataset(rows: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    groups: dict[str, list[Candidate]] = {}
    for row in rows:
        groups.setdefault(row.question.dataset, []).append(row)
    return groups


def _shares(rows: Iterable[Candidate], total: int) -> dict[str, int]:
    """Equal shares of `total` over the datasets; what a small one cannot give, the others do."""
    left = {dataset: len(group) for dataset, group in _by_dataset(rows).items()}
    shares: dict[str, int] = {}
    for dataset in sorted(left, key=lambda name: (left[name], name)):
        shares[dataset] = min(left[dataset], total // (len(left) - len(shares)))
        total -= shares[dataset]
    return shares


def _assert_sizes(sizes: Mapping[str, int], test: Sequence[Candidate]) -> None:
    drawn = Counter(row.question.dataset for row in test)
    short = [
        f"{dataset}: {size} asked, {drawn[dataset]} left after removal"
        for dataset, size in sizes.items()
        if drawn[dataset] != size
    ]
    if short:
        raise DataError(f"data.test_sizes: {'; '.join(short)}; ask for fewer")


def _assert_filled(config: DataConfig, num_train: int, num_dev: int, num_test: int) -> None:
    if num_train == 0 or num_test == 0 or num_dev < config.dev_size:
        raise DataError(
            f"{num_train} train, {num_dev} dev and {num_test} test questions are left; expected at "
            f"least one of train and test and {config.dev_size} of dev: use more data, or set "
            "data.dev_size, data.train_datasets or data.require_support"
        )
    if config.train_size is not None and config.train_size > num_train:
        raise DataError(
            f"data.train_size: {config.train_size} asked, {num_train} left after removal and "
            "development rows; ask for fewer"
        )
