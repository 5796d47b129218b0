"""The client against servers that misbehave."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from moopd.retrieval.base import Hit, RetrievalError
from moopd.retrieval.client import RemoteRetriever
from moopd.types import Passage
from tests.http_fakes import QuietHandler


@contextmanager
def fake(answer: Callable[[int, dict[str, Any]], tuple[int, bytes]]) -> Iterator[tuple[str, list]]:
    """A server whose n-th answer is `answer(n, body)`; the bodies it got."""
    got: list[dict[str, Any]] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            got.append(body)
            self.send(*answer(len(got), body))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _good(number: int, body: dict[str, Any]) -> tuple[int, bytes]:
    document = {"id": 5, "contents": '"Milan"\nA city.'}
    result = [[{"document": document, "score": 0.5}] for _ in body["queries"]]
    return 200, json.dumps({"result": result}).encode()


def _client(url: str, **options: Any) -> RemoteRetriever:
    return RemoteRetriever(url, backoff_s=0.001, **options)


def test_reads_a_server_that_sends_contents_alone():
    with fake(_good) as (address, got):
        (hits,) = _client(address + "/retrieve/").search_scored(["q"], 3)
    assert hits == [Hit(Passage("5", "Milan", "A city."), 0.5)]
    assert got == [{"queries": ["q"], "topk": 3, "return_scores": True}]


def test_many_queries_go_in_parts():
    with fake(_good) as (address, got):
        found = _client(address, max_queries=3).search([str(i) for i in range(7)], 1)
    assert len(found) == 7
    assert [body["queries"] for body in got] == [["0", "1", "2"], ["3", "4", "5"], ["6"]]


@pytest.mark.parametrize("status", [500, 503, 429])
def test_retries_until_the_server_is_back(status):
    def answer(number: int, body: dict[str, Any]) -> tuple[int, bytes]:
        return (status, b"<html>down</html>") if number < 3 else _good(number, body)

    with fake(answer) as (address, got):
        assert len(_client(address).search(["q"], 1)) == 1
        assert len(got) == 3


@pytest.mark.parametrize(
    "status, content, tries, message",
    [
        (500, b"<html>oops</html>", 2, "no answer in 2 tries; the last one: status 500: <html>"),
        (200, b"<html>", 2, "status 200 with a body that is no JSON"),
        (422, b'{"detail": "topk: no"}', 1, "refused the request: status 422: .*topk: no"),
        (404, b"", 1, "status 404"),
        (200, b'{"result": []}', 1, "got 0 results, expected one list for each of 1"),
        (200, b'{"result": [[{"document": {"id": 1}, "score": 1}]]}', 1, "no scored document"),
        (200, b'{"result": [[{"id": 1, "contents": "x"}]]}', 1, "no scored document"),
        (200, b'{"error": "x"}', 1, "got NoneType results"),
    ],
)
def test_a_failure_names_its_cause(status, content, tries, message):
    with (
        fake(lambda number, body: (status, content)) as (address, got),
        pytest.raises(RetrievalError, match=message),
    ):
        _client(address, max_tries=2).search(["q"], 1)
    assert len(got) == tries


def test_a_server_that_is_down_or_silent():
    with fake(_good) as (address, _):
        pass
    with pytest.raises(RetrievalError, match=r"no answer in 2 tries; the last one: ConnectError"):
        _client(address, max_tries=2).search(["q"], 1)

    def slow(number: int, body: dict[str, Any]) -> tuple[int, bytes]:
        time.sleep(0.3)
        return _good(number, body)

    with fake(slow) as (address, _), pytest.raises(RetrievalError, match="ReadTimeout"):
        _client(address, max_tries=2, timeout_s=0.05).search(["q"], 1)


def test_an_address_without_scheme_is_refused():
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        RemoteRetriever("localhost:8000")


def test_waits_double(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("moopd.http_client.time.sleep", waits.append)
    with fake(lambda number, body: (503, b"")) as (address, _), pytest.raises(RetrievalError):
        RemoteRetriever(address, backoff_s=0.25, max_tries=5).search(["q"], 1)
    assert waits == [0.0, 0.25, 0.5, 1.0, 2.0]


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with fake(_good) as (address, _):
        assert len(_client(address, max_tries=1).search(["q"], 1)) == 1


def test_zero_queries_ask_nobody():
    client = _client("http://127.0.0.1:9")
    assert client.search([], 3) == []
    with pytest.raises(ValueError, match="top_k"):
        client.search(["x"], 0)
