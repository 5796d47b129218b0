"""Queries per second: our server against a plain loop that searches FAISS query by query.

The loop is what the published Search-R1 retrieval server does for each query of a request (encode,
search the flat index, load the documents), here without HTTP, which is in its favour. Both sides
answer the same queries over the same vectors in one run; the answers are compared.

    python benchmarks/retrieval.py                          # synthetic passages
    python benchmarks/retrieval.py --corpus corpus.jsonl.gz --passages 60000
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np

from moopd.config import RetrievalConfig
from moopd.retrieval.base import RetrievalError
from moopd.retrieval.build import build_index, make_encoder, open_index
from moopd.retrieval.client import RemoteRetriever
from moopd.retrieval.corpus import indexed_text, read_passages, to_line
from moopd.retrieval.server import serve
from moopd.retrieval.store import PassageStore
from moopd.types import Passage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, help="a corpus file; default: synthetic passages")
    parser.add_argument("--passages", type=int, default=30_000)
    parser.add_argument("--dimension", type=int, default=512)
    parser.add_argument("--model", help="E5 folder or hub name; default: the hashing encoder")
    parser.add_argument("--queries", type=int, default=2048)
    parser.add_argument("--per-request", type=int, default=4)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--device", choices=["cpu", "gpu", "auto"], default="cpu")
    arguments = parser.parse_args()
    encoder = {"kind": "hashing", "dimension": arguments.dimension}
    if arguments.model:
        encoder = {"kind": "e5", "model": arguments.model}
    config = RetrievalConfig.model_validate(
        {"kind": "dense", "encoder": encoder, "device": arguments.device}
    )
    with tempfile.TemporaryDirectory() as root:
        corpus, index = Path(root) / "corpus.jsonl", Path(root) / "index"
        passages = list(_passages(arguments.corpus, arguments.passages))
        corpus.write_bytes(b"".join(map(to_line, passages)))
        started = time.perf_counter()
        build_index(config, corpus, index)
        seconds = time.perf_counter() - started
        print(f"index: {len(passages)} passages in {seconds:.1f} s, with every check")
        queries = _queries(passages, arguments.queries)
        loop_s, expected = plain_loop(config, index, queries)
        server_s, found = through_server(
            config, index, queries, arguments.per_request, arguments.clients
        )
    # Scores and not passages: of equal passages the plain loop takes any.
    worst = max(
        abs(a - b)
        for row, other in zip(expected, found, strict=True)
        for a, b in zip(row, other, strict=True)
    )
    print(f"plain loop: {len(queries) / loop_s:.1f} queries/s")
    print(
        f"server:     {len(queries) / server_s:.1f} queries/s ({arguments.clients} clients, "
        f"{arguments.per_request} queries a request)"
    )
    print(f"ratio:      {loop_s / server_s:.1f}; largest difference of a score: {worst:.1e}")


def plain_loop(
    config: RetrievalConfig, index: Path, queries: list[str]
) -> tuple[float, list[list[float]]]:
    """Seconds and scores: one query after the other through encoder, index and documents."""
    import faiss

    encoder = make_encoder(config.encoder, config.device)
    encoder.load(index)
    vectors = np.load(index / "vectors-00000.npy")
    flat = faiss.IndexFlatIP(vectors.shape[1])
    flat.add(vectors)
    store = PassageStore(index, 1)
    found = []
    started = time.perf_counter()
    for query in queries:
        scores, positions = flat.search(encoder.encode_queries([query]), config.top_k)
        documents = store.many(positions[0].tolist())
        found.append([float(score) for score, _ in zip(scores[0], documents, strict=True)])
    return time.perf_counter() - started, found


def through_server(
    config: RetrievalConfig, index: Path, queries: list[str], per_request: int, clients: int
) -> tuple[float, list[list[float]]]:
    """Seconds and scores: concurrent clients of a server in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(config.model_dump_json(), str(index), port), daemon=True
    )
    process.start()
    try:
        client = RemoteRetriever(f"http://127.0.0.1:{port}", max_connections=clients)
        _wait(client)
        requests = [queries[i : i + per_request] for i in range(0, len(queries), per_request)]
        started = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            answers = list(
                pool.map(lambda request: client.search_scored(request, config.top_k), requests)
            )
        seconds = time.perf_counter() - started
    finally:
        process.terminate()
        process.join()
    return seconds, [[hit.score for hit in hits] for answer in answers for hits in answer]


def _serve(config_json: str, index: str, port: int) -> None:
    config = RetrievalConfig.model_validate_json(config_json)
    serve(open_index(config, Path(index)), port=port, top_k=config.top_k)


def _wait(client: RemoteRetriever) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            client.search(["warm up"] * 32, 3)
            return
        except RetrievalError:
            if time.monotonic() > deadline:
                raise


def _passages(corpus: Path | None, count: int) -> Iterator[Passage]:
    if corpus is not None:
        yield from islice(read_passages(corpus), count)
        return
    choice = random.Random(0)
    words = [f"w{number}" for number in range(20_000)]
    # Zipf-like: as in text, few words make up most of a passage.
    weights = [1 / (rank + 10) for rank in range(len(words))]
    for number in range(count):
        yield Passage(str(number), "", " ".join(choice.choices(words, weights, k=60)))


def _queries(passages: list[Passage], count: int) -> list[str]:
    """Six neighbouring words of a passage each."""
    choice = random.Random(1)
    queries = []
    for _ in range(count):
        words = indexed_text(choice.choice(passages)).split()
        start = choice.randrange(max(1, len(words) - 5))
        queries.append(" ".join(words[start : start + 6]))
    return queries


if __name__ == "__main__":
    main()
