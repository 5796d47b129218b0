"""One stage as a flow of its own: what a deployment of a single stage runs."""

from __future__ import annotations

from prefect import flow

from flows.reproduce import reproduce, task_runner


@flow(name="stage", task_runner=task_runner, validate_parameters=False)
def stage(
    name: str,
    scale: str = "tiny",
    overrides: list[str] | None = None,
    systems: list[str] | None = None,
    seeds: int = 1,
    force: bool = False,
    home: str | None = None,
) -> dict[str, str]:
    """Run a stage (`train` means all of a kind); its upstream must be there already."""
    # The plain function: one flow run in Prefect, not a flow inside a flow.
    return reproduce.fn(
        scale=scale,
        systems=systems,
        overrides=overrides,
        seeds=seeds,
        only=[name],
        force=[name] if force else None,
        home=home,
    )
