"""Task runs are read from Prefect page by page, in a stated order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID

from flows.prefect_state import _crash, _final_rows

FLOW = "00000000-0000-0000-0000-000000000001"


class Client:
    """Pages as Prefect's client gives them; a server of today refuses a request without a sort."""

    def __init__(self, states: list[bool]) -> None:
        self.rows = [
            SimpleNamespace(id=n, state=SimpleNamespace(is_final=lambda final=final: final))
            for n, final in enumerate(states)
        ]
        self.crashed: list[Any] = []

    def read_task_runs(
        self, *, flow_run_filter: Any, sort: Any, offset: int = 0, limit: int = 200
    ) -> list[Any]:
        assert sort is not None
        assert flow_run_filter.id.any_ == [UUID(FLOW)]
        return self.rows[offset : offset + limit]

    def set_task_run_state(self, task: int, state: Any, *, force: bool) -> None:
        self.crashed.append((task, state.name, force))

    def set_flow_run_state(self, flow_run: UUID, state: Any, *, force: bool) -> None:
        self.crashed.append((flow_run, state.name, force))


def test_rows_of_all_pages_are_counted_and_one_that_runs_is_waited_for() -> None:
    assert _final_rows(Client([True] * 200 + [True]), FLOW) == 201  # type: ignore[arg-type]
    assert _final_rows(Client([]), FLOW) == 0  # type: ignore[arg-type]
    assert _final_rows(Client([True] * 200 + [False]), FLOW) == -1  # type: ignore[arg-type]


def test_a_lost_run_crashes_with_the_tasks_that_had_not_ended() -> None:
    client = Client([True, False])
    _crash(client, UUID(FLOW))  # type: ignore[arg-type]
    assert client.crashed == [(1, "Crashed", True), (UUID(FLOW), "Crashed", True)]
