"""A retriever of this process behind HTTP, for the processes of verl."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from moopd.retrieval.base import RetrievalError, ScoredRetriever

_START_S = 30.0


@contextmanager
def served(retriever: ScoredRetriever, top_k: int) -> Iterator[str]:
    """URL of a server on a free port of this machine, for as long as the block runs."""
    import uvicorn

    from moopd.retrieval.server import create_app

    config = uvicorn.Config(
        create_app(retriever, top_k), host="127.0.0.1", port=0, log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{_port(server, thread)}"
    finally:
        server.should_exit = True
        thread.join(_START_S)


def _port(server: object, thread: threading.Thread) -> int:
    for _ in range(int(_START_S / 0.05)):
        if getattr(server, "started", False):
            port: int = server.servers[0].sockets[0].getsockname()[1]  # type: ignore[attr-defined]
            return port
        thread.join(0.05)
    raise RetrievalError(f"the retrieval server did not start within {_START_S:.0f} s")
