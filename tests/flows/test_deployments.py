"""The three commands of the README against a real Prefect server and worker."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tasks.home import ROOT
from tests.flows.shell import Shell, servers_up


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """Servers up, deployments registered, a worker at work."""
    shell = Shell(tmp_path_factory.mktemp("schedule"))
    with servers_up(shell):
        shell("deploy")
        # As a script starts it: background jobs are born ignoring SIGINT, and it must end anyway.
        worker = shell.start("worker", sigint=signal.SIG_IGN)
        yield shell
        os.killpg(worker.pid, signal.SIGTERM)
        worker.communicate(timeout=60)


def api(shell: Shell, path: str, body: dict[str, Any] | None = None) -> Any:
    address = json.loads((shell.home / "server.json").read_text())["prefect"]
    request = urllib.request.Request(
        f"{address}/api/{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    for patience in (1, 3, 10, None):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            # On a busy machine the server answers 503 while its database is locked.
            if error.code < 500 or patience is None:
                raise
            time.sleep(patience)
    raise AssertionError("unreachable")


def start(shell: Shell, deployment: str, **parameters: Any) -> str:
    found = api(shell, f"deployments/name/{deployment}")
    body = {"parameters": {**parameters, "home": str(shell.home)}, "state": {"type": "SCHEDULED"},
            "idempotency_key": uuid.uuid4().hex}  # fmt: skip
    return str(api(shell, f"deployments/{found['id']}/create_flow_run", body)["id"])


def wait(shell: Shell, flow_run: str) -> tuple[str, str]:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        state = api(shell, f"flow_runs/{flow_run}")["state"]
        if state["type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED"):
            return state["type"], state["message"] or ""
        time.sleep(0.5)
    raise AssertionError(f"the flow run is still {state['type']}")


def test_a_stage_runs_from_its_deployment_and_an_overlapping_schedule_is_skipped(
    scheduled: Shell,
) -> None:
    """Case 38."""
    only = {"scale": "smoke", "only": ["prepare"]}
    both = [start(scheduled, "reproduce/nightly-tiny", **only) for _ in range(2)]
    ended = sorted(wait(scheduled, flow_run)[0] for flow_run in both)
    assert ended == ["CANCELLED", "COMPLETED"]
    assert scheduled.executed(0) == ["prepare"]

    state, message = wait(scheduled, start(scheduled, "stage/index", scale="smoke"))
    assert state == "COMPLETED", message
    assert scheduled.executed(0) == ["prepare", "index"]

    state, message = wait(scheduled, start(scheduled, "stage/report", scale="smoke"))
    assert state == "FAILED" and "missing upstream" in message


def test_every_stage_has_a_deployment_and_schedules_name_their_time_zone() -> None:
    from tasks.stages import SOURCES

    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    names = {row["name"] for row in deployments}
    assert names == {"nightly-tiny", "weekly-small", *SOURCES}
    for row in deployments:
        for schedule in row.get("schedules", []):
            assert schedule["timezone"] == "Europe/Berlin"
            assert row["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
