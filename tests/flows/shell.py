"""The `moopd` command as a user calls it, with a home of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moopd.tracking.journal import read
from tasks.guard import end_with_parent
from tasks.home import ROOT


@dataclass(frozen=True)
class Shell:
    """The `moopd` command with a home of its own."""

    home: Path
    root: Path = ROOT
    """The sources that it runs."""

    def of(self, root: Path) -> Shell:
        """The same home, under a copy of the sources."""
        return Shell(self.home, root)

    def __call__(self, *arguments: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command(*arguments), cwd=self.root, env=self.environment(), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout[-3000:]
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", "--home", str(self.home), *arguments]

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MOOPD_"))}
        # Before the installed package.
        return {**kept, "COLUMNS": "160", "PYTHONPATH": str(self.root)}

    def artifact(self, stage: str) -> Path:
        (path,) = (self.home / "artifacts" / stage.replace("/", "__")).glob("[!.]*")
        return path

    def digests(self) -> dict[str, str]:
        """Content digest of every artifact."""
        manifests = sorted((self.home / "artifacts").glob("*/[!.]*/artifact.json"))
        return {path.parent.parent.name: json.loads(path.read_text())["sha256"]
                for path in manifests}  # fmt: skip

    def start(
        self, *arguments: str, sigint: signal.Handlers = signal.SIG_DFL
    ) -> subprocess.Popen[str]:
        """In the background, in a process group of its own; output is kept in the pipe.

        Whether SIGINT reaches it must not depend on how the tests themselves were started.
        """

        def prepare() -> None:
            signal.signal(signal.SIGINT, sigint)
            end_with_parent()

        return subprocess.Popen(
            self.command(*arguments), cwd=self.root, env=self.environment(), text=True,
            start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=prepare,
        )  # fmt: skip

    def events(self) -> list[dict[str, object]]:
        journals = sorted((self.home / "journal").glob("*.jsonl"))
        return [event for path in journals for event in read(path)]

    def executed(self, since: int) -> list[object]:
        return [e["stage"] for e in self.events()[since:] if e["event"] == "stage_finished"]

    def wait_for(self, kind: str, stage: str, since: int = 0, timeout_s: float = 400) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self.events()[since:]:
                if event["event"] == kind and event.get("stage") == stage:
                    return
            time.sleep(0.05)
        raise AssertionError(f"no {kind} of {stage} within {timeout_s:.0f} s")


def kill_9(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@contextmanager
def servers_up(shell: Shell) -> Iterator[dict[str, str]]:
    """`moopd up` in the background: the addresses it wrote."""
    process = shell.start("up")
    place = shell.home / "server.json"
    try:
        deadline = time.monotonic() + 300
        while not place.is_file():
            assert process.poll() is None and time.monotonic() < deadline, "moopd up did not come"
            time.sleep(0.2)
        yield json.loads(place.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert not place.exists()
