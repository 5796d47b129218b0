"""An MLflow store on sqlite: runs are found by their tags, so writing twice changes nothing."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moopd.tracking.sqlite import damaged, put_aside

PIPELINE = "moopd-pipeline"
EVALUATION = "moopd-evaluation"
_SMALL_ARTIFACT = 4_000_000
_SHOWN = (".json", ".jsonl", ".md", ".html", ".png", ".svg", ".parquet", ".yaml")
_BATCH = 900
_MAX_PARAM = 500
_MAX_DIGEST = 36
"""Longer ones are refused by MLflow."""

Point = tuple[str, float, int, int]
"""Metric name, value, milliseconds, step."""


class Store:
    """Both experiments under `folder`, created once under a lock."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.uri = uri or f"sqlite:///{folder / 'mlflow.db'}"
        with locked(folder / "init.lock"):
            # The first use of a fresh sqlite store is not safe for several processes, and its
            # tables are not made in one step: one that was cut short is made anew, and replayed.
            if uri is None:
                _make_way(folder)
            from mlflow.tracking import MlflowClient

            self.client = MlflowClient(tracking_uri=self.uri)
            self.experiments = {name: self._experiment(name) for name in (PIPELINE, EVALUATION)}
            write_json(folder / "experiments.json", self.experiments)
        self._known: dict[str, str] = {}

    def _experiment(self, name: str) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        place = (self.folder / "artifacts").as_uri()
        return str(self.client.create_experiment(name, artifact_location=f"{place}/{name}"))

    def run_with(
        self, experiment: str, tag: str, value: str, tags: Mapping[str, str], name: str, start: int
    ) -> str:
        """The run that carries a tag, created (start in milliseconds) when there is none."""
        key = f"{experiment}/{tag}/{value}"
        if key not in self._known:
            found = self.search(experiment, f"tags.`{tag}` = '{value}'")
            if found:
                self._known[key] = found[0].info.run_id
            else:
                made = self.client.create_run(
                    self.experiments[experiment],
                    start_time=start,
                    tags={**tags, tag: value},
                    run_name=name,
                )
                self._known[key] = made.info.run_id
        return self._known[key]

    def search(self, experiment: str, query: str) -> list[Any]:
        runs: list[Any] = []
        token = None
        while True:
            page = self.client.search_runs([self.experiments[experiment]], query, page_token=token)
            runs += page
            token = page.token
            if not token:
                return runs

    def params(self, run_id: str, values: Mapping[str, Any]) -> None:
        """Parameters are immutable: what is there already stays."""
        from mlflow.entities import Param

        there = self.client.get_run(run_id).data.params
        new = [
            Param(name, str(value)[:_MAX_PARAM])
            for name, value in values.items()
            if name not in there
        ]
        for start in range(0, len(new), 100):
            self.client.log_batch(run_id, params=new[start : start + 100])

    def metrics(self, run_id: str, points: Iterable[Point]) -> None:
        from mlflow.entities import Metric

        entries = [Metric(_metric_name(name), *rest) for name, *rest in points]
        for start in range(0, len(entries), _BATCH):
            self.client.log_batch(run_id, metrics=entries[start : start + _BATCH])

    def tags(self, run_id: str, values: Mapping[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(k, v[:5000]) for k, v in values.items()])

    def upload(self, run_id: str, folder: Path, pattern: str = "*") -> None:
        """Copies of the small files of a folder that a person looks at."""
        for path in sorted(folder.rglob(pattern)):
            small = path.is_file() and path.stat().st_size <= _SMALL_ARTIFACT
            if small and path.suffix in _SHOWN:
                parent = str(path.parent.relative_to(folder))
                self.client.log_artifact(run_id, str(path), None if parent == "." else parent)

    def dataset(self, run_id: str, name: str, digest: str, context: str) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        entry = Dataset(name, digest[:_MAX_DIGEST], "local", "questions")
        tag = InputTag("mlflow.data.context", context)
        self.client.log_inputs(run_id, [DatasetInput(entry, [tag])])

    def register(self, name: str, alias: str, run_id: str, path: str, sha256: str) -> None:
        """A pointer to a policy (path and digest), not a copy of its weights; one per digest."""
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):
            self.client.create_registered_model(name)
        versions = self.client.search_model_versions(f"name = '{name}'")
        known = [v.version for v in versions if v.tags.get("sha256") == sha256]
        if not known:
            made = self.client.create_model_version(
                name, source=Path(path).as_uri(), run_id=run_id,
                tags={"sha256": sha256, "path": path},
            )  # fmt: skip
            known = [made.version]
        self.client.set_registered_model_alias(name, alias, known[0])

    def end(self, run_id: str, state: str, stamp: int) -> None:
        self.client.set_terminated(run_id, state, end_time=stamp)


def _make_way(folder: Path) -> None:
    """Before the first use: a database that is not there, not finished or damaged is replayed."""
    database = folder / "mlflow.db"
    begun = (folder / "experiments.json").exists()
    problem = damaged(database) if begun and database.exists() else None
    if begun and database.exists() and problem is None:
        return
    if problem is None:
        database.unlink(missing_ok=True)
    else:
        aside = put_aside(database)
        print(
            f"moopd: MLflow's database was damaged ({problem}); it is kept as {aside} and made "
            "anew from the journal",
            file=sys.stderr,
        )
    shutil.rmtree(folder / "synced", ignore_errors=True)


def comparison_page(experiment: str) -> str:
    """Path of the page that charts all runs of an experiment; without the type it is hidden."""
    return f"/#/experiments/{experiment}/runs?workflowType=machine_learning&compareRunsMode=CHART"


def _metric_name(name: str) -> str:
    """MLflow takes letters, digits and _-./ and blanks; nothing of ours but '@' is refused."""
    return name.replace("@", "_at_").replace(":", "_")


def write_json(path: Path, tree: object) -> None:
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(tree))
    os.replace(temporary, path)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
