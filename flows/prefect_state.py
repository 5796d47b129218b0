"""What Prefect's database says about runs: rows waited for at the end, lost ones marked as crashed.

Prefect is a view: nothing is read back from it, and no failure here stops a run.
"""

from __future__ import annotations

import sys
import time
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowFilter,
    FlowFilterName,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import State, StateType
from prefect.client.schemas.sorting import FlowRunSort, TaskRunSort
from prefect.events.worker import EventsWorker
from prefect.states import Crashed

from moopd.tracking import journal
from tasks.home import Home

FLOWS = ["reproduce", "stage"]
_UNKNOWN_S = 60.0
"""A run in Prefect that no journal knows is lost after this long."""


def wait_for_rows(flow_run: str | None, num_tasks: int, timeout_s: float = 10.0) -> bool:
    """Task states reach the database after the flow has ended: wait until all are final there."""
    if flow_run is None:
        return True
    deadline = time.monotonic() + timeout_s
    EventsWorker.drain_all(timeout=timeout_s)
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            if _final_rows(client, flow_run) >= num_tasks:
                return True
            time.sleep(0.2)
    return False


def reap(home: Home, mine: str | None) -> None:
    """Flow runs of this home that no process runs any more become Crashed, with their tasks."""
    try:
        with get_client(sync_client=True) as client:
            running = client.read_flow_runs(
                flow_filter=FlowFilter(name=FlowFilterName(any_=FLOWS)),
                flow_run_filter=_in_states(StateType.RUNNING, StateType.CANCELLING),
                sort=FlowRunSort.ID_DESC,
            )
            others = [run for run in running if str(run.id) != mine]
            alive = _alive(home) if others else {}
            for run in others:
                known = alive.get(str(run.id))
                age = time.time() - run.start_time.timestamp() if run.start_time else 0.0
                if known is False or (known is None and age > _UNKNOWN_S):
                    _crash(client, run.id)
    except Exception as error:
        print(f"moopd: Prefect's lost runs were not marked ({error})", file=sys.stderr)


def _alive(home: Home) -> dict[str, bool]:
    """Prefect's id of every run in the journal -> whether a process still holds it."""
    found: dict[str, bool] = {}
    for run in journal.runs(home.journal):
        flow_run = journal.first(home.journal / f"{run}.jsonl").get("flow_run")
        if flow_run:
            found[flow_run] = journal.is_alive(home.journal, run)
    return found


def _crash(client: SyncPrefectClient, flow_run: UUID) -> None:
    lost: State[Any] = Crashed(message="The process ended without a word (kill -9, power loss).")
    tasks = client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])),
        sort=TaskRunSort.ID_DESC,
    )
    for task in tasks:
        if task.state is None or not task.state.is_final():
            client.set_task_run_state(task.id, lost, force=True)
    client.set_flow_run_state(flow_run, lost, force=True)


def _final_rows(client: SyncPrefectClient, flow_run: str) -> int:
    rows = 0
    while True:
        page = client.read_task_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run)])),
            sort=TaskRunSort.ID_DESC,  # pages need an order, and newer servers refuse none
            offset=rows,
            limit=200,
        )
        if any(task.state is None or not task.state.is_final() for task in page):
            return -1
        rows += len(page)
        if len(page) < 200:
            return rows


def _in_states(*states: StateType) -> FlowRunFilter:
    return FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(states))))
