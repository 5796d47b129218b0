"""The wire format over real HTTP on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from moopd.retrieval.base import Hit, RetrievalError, passages_only
from moopd.retrieval.client import RemoteRetriever
from moopd.retrieval.server import ServerLimits, create_app
from moopd.types import Passage


@dataclass
class Numbers:
    """Answers query "n" with passages n-0, n-1, ... of falling score; 20 exist for each."""

    delay_s: float = 0.0
    batches: list[int] = field(default_factory=list)
    num_passages: int = 20

    def search_scored(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        self.batches.append(len(queries))
        time.sleep(self.delay_s)
        if "broken" in queries:
            raise RetrievalError("the index is gone")
        return [
            [
                Hit(Passage(f"{query}-{i}", f"T{i}", f"text {query} {i}\nmore"), 1 - i / 8)
                for i in range(min(top_k, self.num_passages))
            ]
            for query in queries
        ]

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return passages_only(self.search_scored(queries, top_k))


@contextmanager
def running(retriever: Numbers, limits: ServerLimits | None = None) -> Iterator[str]:
    import uvicorn

    app = create_app(retriever, top_k=3, limits=limits, description={"kind": "numbers"})
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    limits = ServerLimits(max_queries=300, max_query_chars=50, max_top_k=30, max_body_bytes=40_000)
    with running(Numbers(), limits) as address:
        yield address


@pytest.mark.parametrize("num_queries", [0, 1, 2, 3, 7, 300])
@pytest.mark.parametrize("topk", [1, 3, 30])
def test_exact_results_for_any_number_of_queries(url, num_queries, topk):
    queries = [str(i) for i in range(num_queries)]
    body = {"queries": queries, "topk": topk}
    plain = httpx.post(f"{url}/retrieve", json=body | {"return_scores": False}).json()["result"]
    scored = httpx.post(f"{url}/retrieve", json=body | {"return_scores": True}).json()["result"]
    expected = [[f"{query}-{i}" for i in range(min(topk, 20))] for query in queries]
    assert [[document["id"] for document in found] for found in plain] == expected
    assert [[item["document"]["id"] for item in found] for found in scored] == expected
    assert all([item["score"] for item in f] == [1 - i / 8 for i in range(len(f))] for f in scored)


def test_documents_and_defaults(url):
    (found,) = httpx.post(f"{url}/retrieve", json={"queries": ["q"]}).json()["result"]
    assert len(found) == 3
    assert found[1] == {
        "id": "q-1",
        "title": "T1",
        "text": "text q 1\nmore",
        "contents": '"T1"\ntext q 1\nmore',
    }


@pytest.mark.parametrize(
    "body, status, message",
    [
        ({"queries": ["a"], "topk": 0}, 422, "topk: Input should be greater than or equal to 1"),
        ({"queries": ["a"], "topk": -3}, 422, "topk"),
        ({"queries": ["a"], "topk": "3"}, 422, "topk"),
        ({"queries": ["a"], "topk": 31}, 422, "topk: got 31, expected at most 30"),
        ({"queries": "a"}, 422, "queries"),
        ({"queries": ["a", None]}, 422, "queries.1"),
        ({"queries": ["a"], "top_k": 3}, 422, "top_k: Extra inputs"),
        ({"topk": 3}, 422, "queries: Field required"),
        ({"queries": ["a"] * 301}, 413, "queries: got 301, expected at most 300"),
        ({"queries": ["a", "b" * 51]}, 413, "query 1: got 51 characters, expected at most 50"),
        ({"queries": ["b" * 50_000]}, 413, "body: expected at most 40000 bytes"),
    ],
)
def test_a_request_out_of_bounds_is_told_why(url, body, status, message):
    response = httpx.post(f"{url}/retrieve", json=body)
    assert response.status_code == status
    assert message in response.json()["detail"]


def test_no_json_is_told(url):
    response = httpx.post(f"{url}/retrieve", content=b'{"queries": [')
    assert response.status_code == 422 and "JSON" in response.json()["detail"]


def test_healthz(url):
    assert httpx.get(f"{url}/healthz").json() == {
        "status": "ok",
        "num_passages": 20,
        "topk": 3,
        "kind": "numbers",
    }


def test_concurrent_requests_share_searches():
    retriever = Numbers(delay_s=0.05)
    with running(retriever) as address, ThreadPoolExecutor(16) as pool:

        def ask(i: int) -> list[list[dict[str, str]]]:
            body = {"queries": [str(i), "same"], "topk": 1 + i % 4}
            return httpx.post(f"{address}/retrieve", json=body, timeout=30).json()["result"]

        for i, (own, same) in enumerate(pool.map(ask, range(32))):
            assert [d["id"] for d in own] == [f"{i}-{k}" for k in range(1 + i % 4)]
            assert [d["id"] for d in same] == [f"same-{k}" for k in range(1 + i % 4)]
    # How many share one depends on how busy the machine is.
    assert len(retriever.batches) < 32
    assert max(retriever.batches) > 2


def test_a_bad_request_does_not_fail_its_neighbours():
    with running(Numbers(delay_s=0.05)) as address, ThreadPoolExecutor(8) as pool:

        def ask(query: str) -> httpx.Response:
            return httpx.post(f"{address}/retrieve", json={"queries": [query]}, timeout=30)

        answers = list(pool.map(ask, ["first", "a", "broken", "b", "c"]))
    assert [a.status_code for a in answers] == [200, 200, 500, 200, 200]
    assert answers[2].json()["detail"] == "RetrievalError: the index is gone"


def test_too_much_waiting_is_refused_with_503():
    limits = ServerLimits(max_waiting=4)
    with running(Numbers(delay_s=0.3), limits) as address, ThreadPoolExecutor(4) as pool:

        def ask(_: int) -> int:
            body = {"queries": ["a", "b"]}
            return httpx.post(f"{address}/retrieve", json=body, timeout=30).status_code

        assert sorted(pool.map(ask, range(4))) == [200, 200, 503, 503]


def test_round_trip_through_our_server(url):
    client = RemoteRetriever(url)
    assert client.search_scored(["x", "y"], 30) == Numbers().search_scored(["x", "y"], 30)
    with pytest.raises(RetrievalError, match="status 422"):
        client.search(["half a pair \ud800"], 3)
    assert client.search(["Ångström 北京"], 1) == Numbers().search(["Ångström 北京"], 1)
    assert client.search([], 3) == []
    with pytest.raises(ValueError, match="top_k"):
        client.search(["x"], 0)
