"""A retriever behind HTTP in the Search-R1 wire format; concurrent requests share one search.

`POST /retrieve {"queries": [...], "topk": 3, "return_scores": true}` answers
`{"result": [[{"document": {...}, "score": 0.9}, ...], ...]}`, one list per query; without scores
each item is the document itself. `GET /healthz` says what is served.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from moopd.retrieval.base import Hit, RetrievalError, ScoredRetriever

if TYPE_CHECKING:
    from fastapi import FastAPI, Request, Response


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What one request may ask, and how much may wait or be searched at once."""

    max_queries: int = 1024
    max_query_chars: int = 8192
    max_top_k: int = 100
    max_body_bytes: int = 16 << 20
    max_batch: int = 512
    """Queries of one search; a larger request is searched alone."""
    max_waiting: int = 16_384
    """Queries accepted and not yet searched; beyond them the answer is 503."""


class _Refused(Exception):
    """A request that gets a 4xx or 503 with a reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _RetrieveRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    queries: tuple[StrictStr, ...]
    topk: StrictInt | None = Field(None, ge=1)
    return_scores: StrictBool = False


@dataclass(slots=True)
class _Job:
    queries: tuple[str, ...]
    top_k: int
    done: asyncio.Future[list[list[Hit]]]


class _Batcher:
    """Searches in one worker thread; what arrives meanwhile is the next batch."""

    def __init__(self, retriever: ScoredRetriever, limits: ServerLimits) -> None:
        self._retriever, self._limits = retriever, limits
        self._jobs: list[_Job] = []
        self._waiting = 0
        self._wake = asyncio.Event()

    async def submit(self, queries: tuple[str, ...], top_k: int) -> list[list[Hit]]:
        if self._waiting + len(queries) > self._limits.max_waiting:
            raise _Refused(
                503, f"{self._waiting} queries wait already, at most {self._limits.max_waiting} may"
            )
        job = _Job(queries, top_k, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._waiting += len(queries)
        self._wake.set()
        return await job.done

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            batch = self._take()
            if not self._jobs:
                self._wake.clear()
            results = await asyncio.to_thread(self._search, batch)
            self._waiting -= sum(len(job.queries) for job in batch)
            for job, result in zip(batch, results, strict=True):
                if job.done.cancelled():
                    continue
                if isinstance(result, Exception):
                    job.done.set_exception(result)
                else:
                    job.done.set_result(result)

    def _take(self) -> list[_Job]:
        batch, size = [self._jobs.pop(0)], 0
        size = len(batch[0].queries)
        while self._jobs and size + len(self._jobs[0].queries) <= self._limits.max_batch:
            batch.append(self._jobs.pop(0))
            size += len(batch[-1].queries)
        return batch

    def _search(self, batch: Sequence[_Job]) -> list[list[list[Hit]] | Exception]:
        unique = list(dict.fromkeys(query for job in batch for query in job.queries))
        try:
            # Hits are ordered by score and position: the best k of more are the best k.
            hits = self._retriever.search_scored(unique, max(job.top_k for job in batch))
        except Exception as error:
            if len(batch) == 1:
                return [error]
            # One request's bad query must not fail its neighbours.
            return [self._search([job])[0] for job in batch]
        found = dict(zip(unique, hits, strict=True))
        return [[found[query][: job.top_k] for query in job.queries] for job in batch]


def create_app(
    retriever: ScoredRetriever,
    top_k: int = 3,
    limits: ServerLimits | None = None,
    description: dict[str, Any] | None = None,
) -> FastAPI:
    """The application; `top_k` counts where a request names none."""
    from fastapi import FastAPI

    bounds = limits or ServerLimits()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batcher = _Batcher(retriever, bounds)
        worker = asyncio.create_task(app.state.batcher.run())
        yield
        worker.cancel()

    app = FastAPI(title="moopd retrieval", lifespan=lifespan, openapi_url=None)

    async def healthz(request: Request) -> Response:
        health = {"status": "ok", "num_passages": retriever.num_passages, "topk": top_k}
        return _json(200, health | (description or {}))

    async def retrieve(request: Request) -> Response:
        try:
            asked = _checked(await _body(request, bounds), bounds)
            if not asked.queries:
                return _json(200, {"result": []})
            hits = await app.state.batcher.submit(asked.queries, asked.topk or top_k)
        except _Refused as refusal:
            return _json(refusal.status, {"detail": refusal.reason})
        except (RetrievalError, ValueError) as error:
            return _json(500, {"detail": f"{type(error).__name__}: {error}"})
        return _json(200, {"result": [_result(found, asked.return_scores) for found in hits]})

    # Plain routes: the body is read under a size limit, and fastapi is imported when it is served.
    app.router.add_route("/healthz", healthz, methods=["GET"])
    app.router.add_route("/retrieve", retrieve, methods=["POST"])
    return app


def serve(
    retriever: ScoredRetriever,
    host: str = "127.0.0.1",
    port: int = 8765,
    top_k: int = 3,
    limits: ServerLimits | None = None,
    description: dict[str, Any] | None = None,
) -> None:
    """Serve until interrupted; on this machine alone unless another host is given."""
    import uvicorn

    app = create_app(retriever, top_k, limits, description)
    uvicorn.run(app, host=host, port=port, log_level="warning", access_log=False)


async def _body(request: Request, limits: ServerLimits) -> bytes:
    received = bytearray()
    async for piece in request.stream():
        received += piece
        if len(received) > limits.max_body_bytes:
            raise _Refused(413, f"body: expected at most {limits.max_body_bytes} bytes")
    return bytes(received)


def _checked(body: bytes, limits: ServerLimits) -> _RetrieveRequest:
    try:
        asked = _RetrieveRequest.model_validate_json(body)
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors()
        ]
        raise _Refused(422, "; ".join(lines[:5])) from None
    if len(asked.queries) > limits.max_queries:
        raise _Refused(
            413, f"queries: got {len(asked.queries)}, expected at most {limits.max_queries}"
        )
    if asked.topk is not None and asked.topk > limits.max_top_k:
        raise _Refused(422, f"topk: got {asked.topk}, expected at most {limits.max_top_k}")
    for number, query in enumerate(asked.queries):
        if len(query) > limits.max_query_chars:
            raise _Refused(
                413,
                f"query {number}: got {len(query)} characters, expected at most "
                f"{limits.max_query_chars}",
            )
    return asked


def _result(hits: Sequence[Hit], with_scores: bool) -> list[dict[str, Any]]:
    documents = [
        {
            "id": hit.passage.id,
            "title": hit.passage.title,
            "text": hit.passage.text,
            "contents": f'"{hit.passage.title}"\n{hit.passage.text}',
        }
        for hit in hits
    ]
    if not with_scores:
        return documents
    return [{"document": d, "score": h.score} for d, h in zip(documents, hits, strict=True)]


def _json(status: int, content: dict[str, Any]) -> Response:
    from fastapi import Response

    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return Response(body, status, media_type="application/json")
