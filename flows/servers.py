"""`moopd up`: a Prefect server and the MLflow page, on loopback, over the home's sqlite files."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moopd.config import ConfigError
from moopd.tracking.sqlite import damaged, put_aside
from tasks import serving
from tasks.children import end_group
from tasks.guard import end_with_parent
from tasks.home import ROOT, Home
from tasks.mirroring import Mirroring

if TYPE_CHECKING:
    from moopd.tracking.mlflow_mirror import Mirror

HOST = "127.0.0.1"
DEFAULTS = {"prefect": f"http://{HOST}:4200", "mlflow": f"http://{HOST}:5000"}
_START_S = 120
_LAST_SYNC_S = 10.0
_SMALL_BYTES = 5_000_000
POOL = "moopd"


def running(home: Home) -> dict[str, str]:
    """Addresses of servers that `moopd up` runs for this home and that answer now."""
    return {
        name: address
        for name, address in serving.addresses(home).items()
        if name in DEFAULTS and _answers(name, address)
    }


@contextlib.contextmanager
def api(home: Home) -> Iterator[bool]:
    """A Prefect API for one command; True when it is a server of our own that ends with us.

    Prefect's own temporary server would outlive a kill -9, and several on a fresh home would race
    for its database.
    """
    address = running(home).get("prefect")
    if os.environ.get("PREFECT_API_URL") or address:
        os.environ.setdefault("PREFECT_API_URL", f"{address}/api")
        yield False
        return
    address = f"http://{HOST}:{_free_port(0)}"
    # Before the import: Prefect reads its settings once.
    os.environ["PREFECT_API_URL"] = f"{address}/api"
    # Lines of the log stay in the home; a process that ends late would wait for this server.
    os.environ.setdefault("PREFECT_LOGGING_TO_API_ENABLED", "false")
    with _starting(home):
        server = _temporary_server(home, address)
        try:
            import prefect  # noqa: F401  (takes as long as the server needs to come up)

            _wait(home, {"prefect": address}, {"prefect": server})
        except BaseException:
            end_group(server)
            raise
    try:
        yield True
    finally:
        del os.environ["PREFECT_API_URL"]
        end_group(server)


def _server(home: Home, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    with _log(home, name).open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tasks.guard", str(os.getpid()), sys.executable, *arguments],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=_quiet(),
        )


@contextlib.contextmanager
def _starting(home: Home) -> Iterator[None]:
    """One start at a time. A database whose first start was cut short is made anew.

    Its tables are not made in one step, so that a half-made one would refuse every later start.
    So would a damaged one, which is put aside: Prefect only shows what ran.
    """
    ready, database = home.prefect / "ready", home.prefect / "prefect.db"
    with (home.prefect / "start.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            for left in home.prefect.glob("prefect.db*"):
                left.unlink()
        problem = damaged(database) if database.exists() else None
        if problem is not None:
            kept = put_aside(database)
            print(
                f"moopd: Prefect's database was damaged ({problem}); it is kept as {kept}",
                file=sys.stderr,
            )
        yield
        ready.touch()


def _temporary_server(home: Home, address: str) -> subprocess.Popen[bytes]:
    """Without page, scheduler and the like."""
    light = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1"}
    with _log(home, "prefect").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "uvicorn", "--factory", "prefect.server.api.server:create_app",
             "--host", HOST, "--port", address.rpartition(":")[2], "--log-level", "error",
             "--lifespan", "on"],
            stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent,
            env={**_quiet(), **light, "PREFECT__SERVER_FINAL": "1"},
        )  # fmt: skip


def serve(home: Home) -> int:
    """Run both servers until a signal; prints their addresses once they answer."""
    with serving.claim(home) as mine:
        if mine:
            return _serve(home)
    there = ", ".join(running(home).values())
    print(f"moopd: this home is served already: {there or 'it is just coming up'}")
    return 0


def _serve(home: Home) -> int:
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
    with mlflow_store(home):
        pass  # Made once, before several processes use it.
    children: dict[str, subprocess.Popen[bytes]] = {}
    mirroring = Mirroring(home)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with _starting(home):
            for name, command in commands.items():
                children[name] = _server(home, name, [*command, "--port", str(ports[name])])
            _wait(home, addresses, children)
        mirroring.poke()
        home.server.write_text(json.dumps(addresses))
        for name, address in addresses.items():
            print(f"{name}: {address}", flush=True)
        while all(child.poll() is None for child in children.values()):
            time.sleep(0.5)
        for name, child in children.items():
            if child.poll() is not None:
                print(f"moopd: the {name} server ended: {_why(home, name)}", file=sys.stderr)
        return 1
    finally:
        # A second signal must not cut the clean-up short.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        home.server.unlink(missing_ok=True)
        for child in children.values():
            end_group(child, grace_s=15)
        mirroring.finish(_LAST_SYNC_S, quiet=True)


@contextlib.contextmanager
def mlflow_store(home: Home) -> Iterator[Mirror]:
    """The home's MLflow store. Raises ConfigError with MLflow's own word when it refuses."""
    from moopd.tracking.mlflow_mirror import Mirror

    try:
        yield Mirror(home.mlflow)
    except Exception as error:
        full = _no_space(home)
        if full is not None:
            raise ConfigError(full) from error
        said = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise ConfigError(
            f"MLflow refused its store in {home.mlflow}: {said[0][:300]}. All it shows is in the "
            f"journal: move {home.mlflow} away and `moopd track sync` makes it anew"
        ) from error


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


def _wait(
    home: Home, addresses: dict[str, str], servers: Mapping[str, subprocess.Popen[bytes]]
) -> None:
    deadline = time.monotonic() + _START_S
    while not all(_answers(name, address) for name, address in addresses.items()):
        for name, server in servers.items():
            if server.poll() is not None:
                raise ConfigError(f"the {name} server ended at its start: {_why(home, name)}")
        if time.monotonic() > deadline:
            logs = ", ".join(str(_log(home, name)) for name in servers)
            raise ConfigError(f"servers did not answer in {_START_S} s; see {logs}")
        time.sleep(0.1)


def _why(home: Home, name: str) -> str:
    """The last line of a server's log, or that there was no space for one."""
    full = _no_space(home)
    if full is not None:
        return full
    with contextlib.suppress(OSError):
        lines = _log(home, name).read_text(errors="replace").split("\n")
        said = [line.strip() for line in lines if line.strip()]
        return f"{said[-1][:300] if said else 'it said nothing'} (log: {_log(home, name)})"
    return f"see {_log(home, name)}"


def _no_space(home: Home) -> str | None:
    """Said before any other cause: without space, databases and logs fail in ways of their own."""
    if shutil.disk_usage(home.root).free < _SMALL_BYTES:
        return f"no space left in {home.root}: free some and try again"
    return None


def _log(home: Home, name: str) -> Path:
    return home.root / f"{name}-server.log"


_HEALTH = {"prefect": "/api/health", "mlflow": "/health"}


def _answers(name: str, address: str) -> bool:
    try:
        with urllib.request.urlopen(address + _HEALTH[name], timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        # Whatever listens there now, it is none of ours.
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
