"""`moopd up`: a Prefect server and the MLflow page, on loopback, over the home's sqlite files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from tasks.home import ROOT, Home
from tasks.worker import end_with_parent

HOST = "127.0.0.1"
DEFAULTS = {"prefect": f"http://{HOST}:4200", "mlflow": f"http://{HOST}:5000"}
_START_S = 120
POOL = "moopd"


def running(home: Home) -> dict[str, str]:
    """Addresses of servers that `moopd up` runs for this home now; empty when there are none."""
    try:
        addresses: dict[str, str] = json.loads(home.server.read_text())
    except (OSError, ValueError):
        return {}
    alive = all(_answers(address) for address in addresses.values())
    return addresses if alive else {}


def serve(home: Home) -> int:
    """Run both servers until a signal; prints their addresses once they answer."""
    ports = {"prefect": _free_port(4200), "mlflow": _free_port(5000)}
    addresses = {name: f"http://{HOST}:{port}" for name, port in ports.items()}
    commands = {
        "prefect": ["-m", "prefect", "server", "start", "--host", HOST],
        "mlflow": [
            "-m", "mlflow", "server", "--host", HOST, "--workers", "1",
            "--backend-store-uri", f"sqlite:///{home.mlflow / 'mlflow.db'}",
            "--artifacts-destination", (home.mlflow / "artifacts").as_uri(),
        ],
    }  # fmt: skip
    from moopd.tracking.mlflow_mirror import Mirror

    Mirror(home.mlflow)
    children = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for name, command in commands.items():
            log = (home.root / f"{name}-server.log").open("ab")
            children.append(
                subprocess.Popen(
                    [sys.executable, *command, "--port", str(ports[name])],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    preexec_fn=end_with_parent,
                    env=_quiet(),
                )
            )
        _wait(addresses)
        home.server.write_text(json.dumps(addresses))
        for name, address in addresses.items():
            print(f"{name}: {address}", flush=True)
        while all(child.poll() is None for child in children):
            time.sleep(0.5)
        return 1
    finally:
        # A second signal must not cut the clean-up short.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        home.server.unlink(missing_ok=True)
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
        for child in children:
            child.wait(timeout=20)


def prefect(home: Home, arguments: list[str]) -> int:
    """Prefect's own command against the running server, from the project's folder."""
    address = running(home).get("prefect")
    if address is None:
        print("moopd: no server; expected one, start it with `moopd up`", file=sys.stderr)
        return 2
    environment = {**_quiet(), "PREFECT_API_URL": f"{address}/api", "MOOPD_HOME": str(home.root)}
    command = [sys.executable, "-m", "prefect", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _quiet() -> dict[str, str]:
    return {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


def _wait(addresses: dict[str, str]) -> None:
    deadline = time.monotonic() + _START_S
    while not all(_answers(address) for address in addresses.values()):
        if time.monotonic() > deadline:
            raise ValueError(f"servers did not answer in {_START_S} s; see the logs in the home")
        time.sleep(0.5)


def _answers(address: str) -> bool:
    path = "/api/health" if address.endswith(":4200") else "/health"
    for candidate in (path, "/api/health", "/health"):
        try:
            with urllib.request.urlopen(address + candidate, timeout=2) as response:
                if response.status == 200:
                    return True
        except OSError:
            continue
    return False


def _free_port(preferred: int) -> int:
    """The preferred port, or any free one where it is taken."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ValueError("no free port on loopback")
