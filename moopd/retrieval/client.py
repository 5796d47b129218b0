"""A retriever that asks a server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moopd.http_client import NoAnswerError, Tries, address, open_client, post
from moopd.retrieval.base import Hit, RetrievalError, check_request, passages_only
from moopd.retrieval.corpus import split_contents
from moopd.types import Passage


class RemoteRetriever:
    """Client of the Search-R1 wire format (`POST /retrieve`).

    `timeout_s` counts for one try; waits between tries start at `backoff_s` and double.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 30.0,
        max_tries: int = 5,
        backoff_s: float = 0.25,
        max_queries: int = 256,
        max_connections: int = 32,
    ) -> None:
        base = address(url, "retrieval url")
        path = base.path.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._url = base.copy_with(path=path)
        self._tries, self._max_queries = Tries(max_tries, backoff_s), max_queries
        self._http = open_client(self._url, timeout_s, max_connections)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return passages_only(self.search_scored(queries, top_k))

    def search_scored(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        check_request(queries, top_k)
        found: list[list[Hit]] = []
        for start in range(0, len(queries), self._max_queries):
            part = list(queries[start : start + self._max_queries])
            found += self._parse(self._post(part, top_k), len(part), top_k)
        return found

    def close(self) -> None:
        self._http.close()

    def _post(self, queries: list[str], top_k: int) -> Any:
        """The decoded body of the first good answer."""
        body = {"queries": queries, "topk": top_k, "return_scores": True}
        try:
            return post(self._http, self._url, body, self._tries, lambda answer: answer)
        except NoAnswerError as error:
            raise RetrievalError(str(error)) from None

    def _parse(self, body: Any, num_queries: int, top_k: int) -> list[list[Hit]]:
        results = body.get("result") if isinstance(body, Mapping) else None
        if not isinstance(results, list) or len(results) != num_queries:
            got = len(results) if isinstance(results, list) else type(results).__name__
            raise RetrievalError(
                f"{self._url}: got {got} results, expected one list for each of {num_queries} "
                "queries; the server does not speak this wire format"
            )
        try:
            return [[_hit(item) for item in found][:top_k] for found in results]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise RetrievalError(
                f"{self._url}: got a result that is no scored document "
                f"({type(error).__name__}: {error})"
            ) from None


def _hit(item: Mapping[str, Any]) -> Hit:
    document = item["document"]
    title, text = document.get("title"), document.get("text")
    if text is None:
        title, text = split_contents(document["contents"])
    if not isinstance(text, str):
        raise TypeError(f"text is {type(text).__name__}")
    return Hit(Passage(str(document["id"]), str(title or ""), text), float(item["score"]))
