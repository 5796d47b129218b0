"""One stage as a flow of its own: what a deployment of a single stage runs."""

from __future__ import annotations

from prefect import flow

from flows.reproduce import reproduce


@flow(name="stage", validate_parameters=False)
def stage(
    name: str,
    scale: str = "tiny",
    overrides: list[str] | None = None,
    systems: list[str] | None = None,
    force: bool = False,
    home: str | None = None,
) -> dict[str, str]:
    """Run a stage (`train` means all of a kind); its upstream must be there already."""
    return reproduce(
        scale=scale,
        systems=systems,
        overrides=overrides,
        only=[name],
        force=[name] if force else None,
        home=home,
    )
