"""What a person sees: the comparison page behind the printed link, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from moopd.config import load_scale
from moopd.evaluation.analysis import RecordsInput, analyse
from moopd.evaluation.records import to_table
from moopd.evaluation.report import write_report
from moopd.evaluation.results import Results, RunProvenance
from moopd.systems import load_systems
from moopd.tracking.journal import Journal
from moopd.types import DATASETS
from tasks import artifacts
from tasks.home import CONFIGS, Home, open_home
from tests.evaluation import made
from tests.flows.browser import find_chromium, page
from tests.flows.shell import Shell, servers_up

ROWS = ("cmas_base", "cmas_rl", "multiagent_opd")
SCALE = load_scale(CONFIGS / "scale" / "smoke.yaml")


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """A home whose one run ended with results and a report."""
    shell = Shell(tmp_path_factory.mktemp("pages") / "hôme")
    home = open_home(str(shell.home))
    book = Journal(home.journal, "r1")
    tree = SCALE.model_dump(mode="json")
    book.write("run_started", scale=tree, commit="abc", environment={"torch": "2.13"})
    results = results_of()
    for stage in ("statistics", "report"):
        seal(home, book, stage, results)
    book.write("run_finished", state="finished")
    shell("track", "sync")
    return shell


def results_of() -> Results:
    asked = made.questions(4)
    return analyse(
        [RecordsInput(to_table(made.records(row, asked)), RunProvenance()) for row in ROWS],
        asked,
        load_systems(CONFIGS / "systems.yaml"),
        SCALE.statistics,
        scale=SCALE,
    )


def seal(home: Home, book: Journal, stage: str, results: Results) -> None:
    key = "0" * 64
    folder = artifacts.temporary_path(home, stage, key)
    if stage == "report":
        write_report(results, folder)
    else:
        (folder / "results.json").write_text(results.to_json())
        (folder / "manifest.json").write_text(json.dumps({"sha256": {"test": "d" * 64}}))
    ref = artifacts.finish(folder, home, stage, key, {}, 1.0, "r1")
    book.write("stage_started", stage=stage, key=key, attempt=stage)
    book.write("stage_finished", stage=stage, attempt=stage, key=key, sha256=ref.sha256,
               path=ref.path, seconds=1.0)  # fmt: skip


def test_every_evaluation_run_carries_config_manifest_report_and_figures(shell: Shell) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{shell.home / 'mlflow' / 'mlflow.db'}")
    found = client.get_experiment_by_name("moopd-evaluation")
    runs = client.search_runs([found.experiment_id])
    assert sorted(run.data.params["system"] for run in runs) == sorted(ROWS)
    for run in runs:
        files = {entry.path for entry in client.list_artifacts(run.info.run_id)}
        assert {"config.json", "manifest.json", "report.md", "report.html", "figures"} <= files
        assert run.data.params["training.beta"] == "0.1"
        assert run.data.tags["mlflow.source.git.commit"] == "abc"
        assert run.data.tags["moopd.env.torch"] == "2.13"
        names = {entry.dataset.name for entry in run.inputs.dataset_inputs}
        assert names == set(DATASETS)
        assert {f"avg_at_4/{name}" for name in (*DATASETS, "macro")} <= set(run.data.metrics)
        assert run.info.status == "FINISHED"


@pytest.mark.skipif(find_chromium() is None, reason="no Chromium on this machine")
def test_the_printed_link_opens_the_comparison_of_systems_and_sets(
    shell: Shell, tmp_path: Path
) -> None:
    # MLflow draws only the charts in view: the window holds all of the first section.
    with servers_up(shell), page(tmp_path / "profile", (1400, 4000)) as browser:
        (link,) = re.findall(r"^MLflow: +(\S+)$", shell("compare"), re.MULTILINE)
        browser.open(link, "3 matching runs", "C-MAS base", "C-MAS + RL", "MultiAgent-OPD")
        browser.wait("avg_at_4", "pass_at_4", "all_4", "workload")
        browser.wait(*(f"all_4/{name}" for name in (*DATASETS, "macro")))
        browser.screenshot(tmp_path / "comparison.png")
        assert (tmp_path / "comparison.png").stat().st_size > 20_000
