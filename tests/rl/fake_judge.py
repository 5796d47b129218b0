"""A fake judge behind a real HTTP server that speaks the OpenAI chat protocol.

No model answers: a test says what stands in the n-th answer.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from typing import Any

from tests.http_fakes import QuietHandler

Answer = tuple[int, bytes]
Reply = Callable[[int, dict[str, Any]], str | Answer]
"""(number of the request from 1 on, its body) -> the message's text, or status and raw body."""


def user_text(body: dict[str, Any]) -> str:
    """What a request shows the judge: question, sub-question, passages, report."""
    return str(body["messages"][-1]["content"])


class FakeJudge:
    """`with FakeJudge(reply) as judge`: listens at `judge.url`, keeps the bodies it got."""

    def __init__(self, reply: Reply) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._reply = reply
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> FakeJudge:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        if path != "/v1/chat/completions":
            return 404, b"no such route"
        with self._lock:
            self.bodies.append(body)
            number = len(self.bodies)
        reply = self._reply(number, body)
        if not isinstance(reply, str):
            return reply
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, json.dumps({"object": "chat.completion", "choices": [choice]}).encode()

    def _handler(self) -> type[QuietHandler]:
        fake = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                self.send(*fake.answer(self.path, body))

            def do_GET(self) -> None:
                listed = json.dumps({"object": "list", "data": [{"id": "fake"}]}).encode()
                self.send(*((200, listed) if self.path == "/v1/models" else (404, b"")))

        return Handler
