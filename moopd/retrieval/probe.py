"""Known answers that a fresh index must find: a wrong pooling or prefix looks healthy otherwise."""

from __future__ import annotations

from moopd.retrieval.base import IndexBuildError, Retriever
from moopd.retrieval.corpus import indexed_text
from moopd.retrieval.encoder import Encoder
from moopd.retrieval.store import PassageStore
from moopd.retrieval.words import split_words
from moopd.types import Passage

_PAIRS = (
    ("which river flows through the city of paris", "The Seine flows through the city of Paris."),
    ("who wrote the novel moby dick", "Moby Dick is a novel that Herman Melville wrote."),
    ("what is the capital of australia", "Canberra is the capital of Australia."),
    ("what is the highest mountain in japan", "Mount Fuji is the highest mountain in Japan."),
    ("who discovered the drug penicillin", "The drug penicillin was discovered by Fleming."),
    ("when did the berlin wall fall", "The fall of the Berlin Wall began in November 1989."),
    ("which metal has the chemical symbol fe", "Iron is a metal whose chemical symbol is Fe."),
    ("how many legs does a spider have", "Every spider has eight legs and no wings."),
)
"""Questions beside passages that answer them; each shares words with no passage but its own."""

_MIN_PAIRS = 6
_NUM_SAMPLES = 32
_QUERY_WORDS = 16
_TOP_K = 3
_MIN_FOUND = 0.75


def probe_encoder(encoder: Encoder) -> int:
    """Questions of the fixed pairs whose passage comes first, of 8.

    Raises IndexBuildError below 6. Nothing of the index is needed: run it before anything long,
    and before `fit`, which may drop words that the corpus lacks.
    """
    queries = encoder.encode_queries([question for question, _ in _PAIRS])
    passages = encoder.encode_passages([passage for _, passage in _PAIRS])
    scores = queries.astype("float64") @ passages.astype("float64").T
    # The own passage alone within rounding of the best: vectors that are all alike win nothing.
    right = sum(int((row > row[i] - 1e-9).sum()) == 1 for i, row in enumerate(scores))
    if right < _MIN_PAIRS:
        raise IndexBuildError(
            f"known-answer probe: got {right} of {len(_PAIRS)} plain questions with their passage "
            f"first, expected at least {_MIN_PAIRS}; this encoder cannot rank: check its model, "
            f"pooling and prefixes ({encoder.fingerprint})"
        )
    return right


def probe_index(retriever: Retriever, store: PassageStore) -> dict[str, int]:
    """Ask for sampled passages by their own first words; counts of asked and found in the top 3.

    Raises IndexBuildError when fewer than three quarters are found.
    """
    positions = sorted({i * len(store) // _NUM_SAMPLES for i in range(_NUM_SAMPLES)})
    wanted = [p for p in store.many(positions) if split_words(indexed_text(p))]
    queries = [" ".join(indexed_text(p).split()[:_QUERY_WORDS]) for p in wanted]
    found = retriever.search(queries, _TOP_K)
    hits = sum(_contains(passages, p) for p, passages in zip(wanted, found, strict=True))
    if hits < _MIN_FOUND * len(wanted):
        raise IndexBuildError(
            f"known-answer probe: got {hits} of {len(wanted)} passages in the top {_TOP_K} for "
            f"their own first {_QUERY_WORDS} words, expected at least {_MIN_FOUND:.0%}; the index "
            "cannot rank: check the encoder's model, pooling, prefixes and dimension"
        )
    return {"asked": len(wanted), "found": hits}


def _contains(passages: list[Passage], wanted: Passage) -> bool:
    return any(p.id == wanted.id or p.text == wanted.text for p in passages)
