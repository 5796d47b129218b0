"""What fake servers share: they speak real HTTP on loopback, and only their answers are made up."""

from __future__ import annotations

from contextlib import suppress
from http.server import BaseHTTPRequestHandler


class QuietHandler(BaseHTTPRequestHandler):
    """Keeps connections open, logs nothing."""

    protocol_version = "HTTP/1.1"

    def send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        # A client that gave up waiting is what some tests are about.
        with suppress(BrokenPipeError):
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass
