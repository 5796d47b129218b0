"""Keeps MLflow up to the journal from a process of its own, so that tracking never slows a run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading

from moopd.tracking.store import EVALUATION, comparison_page
from tasks import serving
from tasks.home import ROOT, Home


class Mirroring:
    """Started by the first poke. The process follows on its own when this one is killed."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def poke(self) -> None:
        """Something new is in the journal. Returns at once."""
        with self._lock, contextlib.suppress(OSError):
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def finish(self, timeout_s: float, *, quiet: bool = False) -> None:
        """Take over the rest. What cannot be mirrored is said once and left to the next sync."""
        if self._process is None and serving.is_served(self._home):
            return  # Nothing was computed, and `moopd up` mirrors all runs of the home.
        self.poke()
        process = self._process
        problem = "it could not be started"
        if process is not None:
            try:
                _, said = process.communicate(timeout=timeout_s)
                if process.returncode == 0:
                    return
                problem = said.decode(errors="replace").strip() or f"status {process.returncode}"
            except subprocess.TimeoutExpired:
                # Its stdin is closed: it takes over the rest and ends.
                problem = f"it did not answer in {timeout_s:.0f} s"
            except (OSError, ValueError) as error:
                problem = str(error)
        if not quiet:
            sys.stderr.write(
                f"moopd: MLflow is behind ({problem}); `moopd track sync` catches up\n"
            )

    def _start(self) -> subprocess.Popen[bytes]:
        # A group of its own: Ctrl-C in a terminal must not cut the last events off.
        return subprocess.Popen(
            [sys.executable, "-m", "moopd.tracking.follow", str(self._home.mlflow),
             str(self._home.journal)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT,
            start_new_session=True, env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        )  # fmt: skip


def comparison_path(home: Home) -> str:
    """Path of the page that compares all evaluated systems; empty before the first sync."""
    try:
        experiments = json.loads((home.mlflow / "experiments.json").read_text())
        return comparison_page(str(experiments[EVALUATION]))
    except (OSError, ValueError, TypeError, KeyError):
        return ""
