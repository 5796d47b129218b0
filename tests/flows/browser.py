"""A page in headless Chromium, over its debugging protocol: what a person would see."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def text(self) -> str:
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def open(self, address: str, *words: str, timeout_s: float = 90) -> str:
        """Text of a page, once it holds all the words."""
        self.call("Page.navigate", url=address)
        return self.wait(*words, timeout_s=timeout_s)

    def wait(self, *words: str, timeout_s: float = 90) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            text = self.text()
            missing = [word for word in words if word not in text]
            if not missing:
                return text
            assert time.monotonic() < deadline, f"not on the page: {missing}; it says {text[:1500]}"
            time.sleep(0.3)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def page(profile: Path, size: tuple[int, int] = (1440, 1000)) -> Iterator[Page]:
    """A fresh browser without network beyond loopback."""
    chromium = find_chromium()
    assert chromium is not None
    process = subprocess.Popen(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--no-first-run", "--disable-background-networking", "--disable-sync",
         "--hide-scrollbars", f"--user-data-dir={profile}", "--remote-debugging-port=0",
         f"--window-size={size[0]},{size[1]}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        address = _debugger(profile, process)
        with connect(address, max_size=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=30)


def _debugger(profile: Path, process: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + 60
    place = profile / "DevToolsActivePort"
    while not (place.is_file() and "\n" in place.read_text()):
        assert process.poll() is None and time.monotonic() < deadline, "Chromium did not start"
        time.sleep(0.1)
    port = place.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as response:
        tabs = json.load(response)
    return str(next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"])
