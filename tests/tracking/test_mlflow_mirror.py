"""Rules: the mirror replays exactly once, marks lost runs, and keeps immutable parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from moopd.tracking.journal import Journal, reap

pytest.importorskip("mlflow")


def write_run(folder: Path, run: str = "r1") -> Journal:
    book = Journal(folder, run)
    book.write("run_started", scale={"name": "x", "training": {"lr": 0.1}}, commit="abc")
    book.write("stage_started", stage="train/a", key="k", attempt="a1")
    for step in (1, 2):
        book.write("metrics", stage="train/a", attempt="a1", step=step, values={"dev/em": step / 4})
    return book


def test_replaying_twice_changes_nothing_and_lost_runs_are_killed(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from moopd.tracking.mlflow_mirror import PIPELINE, Mirror

    journals = tmp_path / "journal"
    journals.mkdir()
    book = write_run(journals)
    (tmp_path / "mlflow").mkdir()
    mirror = Mirror(tmp_path / "mlflow")
    assert mirror.sync(journals) == 4
    assert mirror.sync(journals) == 0
    book.write("metrics", stage="train/a", attempt="a1", step=3, values={"dev/em": 0.75})
    reap(journals)
    assert mirror.sync(journals) == 2
    # A lost state file means a full replay: nothing may double.
    (tmp_path / "mlflow" / "synced" / "r1.json").unlink()
    mirror.sync(journals)

    client = MlflowClient(tracking_uri=mirror.uri)
    experiment = client.get_experiment_by_name(PIPELINE)
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 2
    assert {run.info.status for run in runs} == {"KILLED"}
    (child,) = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    (parent,) = [run for run in runs if run is not child]
    history = client.get_metric_history(child.info.run_id, "dev/em")
    assert sorted((point.step, point.value) for point in history) == [
        (1, 0.25), (2, 0.5), (3, 0.75),
    ]  # fmt: skip
    assert parent.data.params["training.lr"] == "0.1"
    assert parent.data.tags["mlflow.source.git.commit"] == "abc"
    assert "compareRunsMode=CHART" in mirror.comparison_path()


def test_lines_of_others_in_a_journal_do_not_keep_the_rest_out(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from moopd.tracking.mlflow_mirror import PIPELINE, Mirror

    journals = tmp_path / "journal"
    journals.mkdir()
    book = write_run(journals)
    for event in ("stage_started", "stage_finished", "stage_failed", "stage_cached"):
        book.write(event, stage="x")
    for event in ("metrics", "run_started", "run_finished", "nonsense"):
        book.write(event)
    book.write("metrics", stage="train/a", attempt="a1", step=7, values={"dev/em": "much", "a": 1})
    with book.path.open("ab") as stream:
        stream.write(b"\xff\n{}\n[1]\n")
    book.write("run_finished", state="finished")
    mirror = Mirror(tmp_path / "mlflow")
    mirror.sync(journals)
    assert mirror.sync(journals) == 0
    client = MlflowClient(tracking_uri=mirror.uri)
    experiment = client.get_experiment_by_name(PIPELINE)
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 2 and {run.info.status for run in runs} == {"FINISHED", "KILLED"}
