"""A retriever that asks a server: pooled connections, timeouts, retries, named causes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from moopd.retrieval.base import Hit, RetrievalError, check_request, passages_only
from moopd.retrieval.corpus import split_contents
from moopd.types import Passage

_RETRIED = frozenset({408, 429, 500, 502, 503, 504})
_MAX_WAIT_S = 30.0


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
        import httpx

        base = httpx.URL(url)
        if base.scheme not in ("http", "https") or not base.host:
            raise ValueError(f"retrieval url: got {url!r}, expected http://HOST:PORT")
        path = base.path.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._url = base.copy_with(path=path)
        self._max_tries, self._backoff_s, self._max_queries = max_tries, backoff_s, max_queries
        self._http = httpx.Client(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0)),
            limits=httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
            # A proxy of the environment must not come between this machine and itself.
            trust_env=not _is_loopback(base.host),
        )

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
        import httpx

        # Escaped to ASCII: a query with half a surrogate pair is refused there, not fatal here.
        body = json.dumps({"queries": queries, "topk": top_k, "return_scores": True}).encode()
        cause = ""
        for attempt in range(self._max_tries):
            if attempt:
                time.sleep(min(self._backoff_s * 2 ** (attempt - 1), _MAX_WAIT_S))
            try:
                response = self._http.post(
                    self._url, content=body, headers={"content-type": "application/json"}
                )
            except httpx.HTTPError as error:
                cause = f"{type(error).__name__}: {error}"
                continue
            if response.status_code == 200:
                try:
                    return response.json()
                except ValueError as error:
                    cause = f"status 200 with a body that is no JSON ({error})"
                    continue
            cause = f"status {response.status_code}: {response.text[:300]}"
            if response.status_code not in _RETRIED:
                raise RetrievalError(f"{self._url} refused the request: {cause}")
        raise RetrievalError(
            f"{self._url} gave no answer in {self._max_tries} tries; the last one: {cause}"
        )

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


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
