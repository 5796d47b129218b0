"""Mirrors the journal into MLflow (sqlite, loopback). The only module that imports mlflow.

Replaying is idempotent: a state file beside the store says how far each run was mirrored, runs are
found again by their tags, and metrics carry the journal's time stamps.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from moopd.tracking import journal
from moopd.tracking.journal import Event

PIPELINE = "moopd-pipeline"
EVALUATION = "moopd-evaluation"
TEACHER = "moopd-teacher"
ALIAS = "frozen"
_SMALL_ARTIFACT = 4_000_000
_SHOWN = (".json", ".md", ".html", ".png", ".svg", ".parquet")
_BATCH = 900
_MAX_PARAM = 500
_STATES = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class Mirror:
    """One MLflow store under `folder`; `sync` brings it up to the journal."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        self._folder = folder
        self.uri = uri or f"sqlite:///{folder / 'mlflow.db'}"
        (folder / "synced").mkdir(parents=True, exist_ok=True)
        with _locked(folder / "init.lock"):
            # The first use of a fresh sqlite store is not safe for several processes.
            from mlflow.tracking import MlflowClient

            self._client = MlflowClient(tracking_uri=self.uri)
            self._experiments = {name: self._experiment(name) for name in (PIPELINE, EVALUATION)}

    def sync(self, journals: Path) -> int:
        """Replay what is new in every journal; the number of events taken over."""
        with _locked(self._folder / "sync.lock"):
            return sum(self._sync_run(journals / f"{run}.jsonl") for run in journal.runs(journals))

    def comparison_path(self) -> str:
        """Path of the page that compares the evaluated systems."""
        return f"/#/experiments/{self._experiments[EVALUATION]}?compareRunsMode=CHART"

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        place = (self._folder / "artifacts").as_uri()
        return str(self._client.create_experiment(name, artifact_location=f"{place}/{name}"))

    def _sync_run(self, path: Path) -> int:
        state_file = self._folder / "synced" / f"{path.stem}.json"
        state = json.loads(state_file.read_text()) if state_file.is_file() else {"events": 0}
        events = list(journal.read(path))
        new = events[state["events"] :]
        if not new:
            return 0
        replay = _Replay(self._client, self._experiments, path.stem)
        for event in new:
            replay.take(event)
        replay.flush()
        temporary = state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps({"events": len(events)}))
        os.replace(temporary, state_file)
        return len(new)


class _Replay:
    """Takes the events of one pipeline run over into MLflow."""

    def __init__(self, client: Any, experiments: Mapping[str, str], run: str) -> None:
        self._client = client
        self._experiments = experiments
        self._run = run
        self._known: dict[str, str] = {}
        self._pending: dict[str, list[Any]] = {}

    def take(self, event: Event) -> None:
        handler = getattr(self, f"_on_{event['event']}", None)
        if handler is not None:
            handler(event)

    def flush(self) -> None:
        for run_id, metrics in self._pending.items():
            for start in range(0, len(metrics), _BATCH):
                self._client.log_batch(run_id, metrics=metrics[start : start + _BATCH])
        self._pending.clear()

    def _on_run_started(self, event: Event) -> None:
        parent = self._parent()
        scale = event["scale"]
        self._params(parent, {"scale": scale["name"], **_flat(scale)})
        self._client.log_dict(parent, scale, "config.json")
        self._client.set_tag(parent, "mlflow.source.git.commit", event.get("commit", ""))

    def _on_stage_started(self, event: Event) -> None:
        child = self._child(event["attempt"], event["stage"])
        self._params(child, {"stage": event["stage"], "key": event["key"]})

    def _on_metrics(self, event: Event) -> None:
        from mlflow.entities import Metric

        child = self._child(event["attempt"], event["stage"])
        stamp = int(event["time"] * 1000)
        self._pending.setdefault(child, []).extend(
            Metric(_metric_name(name), float(value), stamp, event["step"])
            for name, value in event["values"].items()
        )

    def _on_stage_finished(self, event: Event) -> None:
        self.flush()
        child = self._child(event["attempt"], event["stage"])
        for name in ("sha256", "path"):
            self._client.set_tag(child, f"moopd.{name}", event[name])
        folder = Path(event["path"])
        if folder.is_dir():
            self._upload(child, folder)
            if event["stage"].startswith("freeze/"):
                self._register(child, event["stage"], event)
            if event["stage"] == "statistics":
                self._evaluation(folder / "results.json")
        self._client.set_terminated(child, "FINISHED")

    def _on_stage_failed(self, event: Event) -> None:
        self.flush()
        child = self._child(event["attempt"], event["stage"])
        self._client.set_tag(child, "moopd.error", event["error"])
        self._client.set_terminated(child, "FAILED")

    def _on_stage_cached(self, event: Event) -> None:
        name = f"moopd.cached.{event['stage'].replace('/', '.')}"
        self._client.set_tag(self._parent(), name, event["origin"])

    def _on_run_finished(self, event: Event) -> None:
        self._end(_STATES.get(event["state"], "FAILED"))

    def _on_run_lost(self, _event: Event) -> None:
        self._end("KILLED")

    def _end(self, state: str) -> None:
        self.flush()
        query = f"tags.`moopd.run` = '{self._run}'"
        for run in self._search(PIPELINE, query):
            if run.info.status == "RUNNING":
                child = "mlflow.parentRunId" in run.data.tags
                self._client.set_terminated(run.info.run_id, "KILLED" if child else state)

    def _parent(self) -> str:
        return self._run_with(PIPELINE, "moopd.parent", self._run, {"moopd.run": self._run})

    def _child(self, attempt: str, stage: str) -> str:
        tags = {
            "moopd.run": self._run,
            "moopd.stage": stage,
            "mlflow.parentRunId": self._parent(),
        }
        return self._run_with(PIPELINE, "moopd.attempt", attempt, tags, name=stage)

    def _run_with(
        self,
        experiment: str,
        tag: str,
        value: str,
        tags: Mapping[str, str],
        name: str | None = None,
    ) -> str:
        """The run that carries a tag, created when there is none."""
        key = f"{experiment}/{tag}/{value}"
        if key not in self._known:
            found = self._search(experiment, f"tags.`{tag}` = '{value}'")
            if found:
                self._known[key] = found[0].info.run_id
            else:
                made = self._client.create_run(
                    self._experiments[experiment],
                    tags={**tags, tag: value},
                    run_name=name or value,
                )
                self._known[key] = made.info.run_id
        return self._known[key]

    def _search(self, experiment: str, query: str) -> list[Any]:
        return list(self._client.search_runs([self._experiments[experiment]], query))

    def _params(self, run_id: str, values: Mapping[str, Any]) -> None:
        """Parameters are immutable: what is there already stays."""
        from mlflow.entities import Param

        there = self._client.get_run(run_id).data.params
        new = [
            Param(name, str(value)[:_MAX_PARAM])
            for name, value in values.items()
            if name not in there
        ]
        for start in range(0, len(new), 100):
            self._client.log_batch(run_id, params=new[start : start + 100])

    def _upload(self, run_id: str, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            small = path.is_file() and path.stat().st_size <= _SMALL_ARTIFACT
            if small and path.suffix in _SHOWN:
                parent = str(path.parent.relative_to(folder))
                self._client.log_artifact(run_id, str(path), None if parent == "." else parent)

    def _register(self, run_id: str, stage: str, event: Event) -> None:
        """A pointer to the frozen policy (path and digest), not a copy of its weights."""
        from mlflow.exceptions import MlflowException

        name = f"{TEACHER}-{stage.removeprefix('freeze/').replace('/', '-')}"
        with suppress(MlflowException):
            self._client.create_registered_model(name)
        version = self._client.create_model_version(
            name, source=Path(event["path"]).as_uri(), run_id=run_id,
            tags={"sha256": event["sha256"], "path": event["path"]},
        )  # fmt: skip
        self._client.set_registered_model_alias(name, ALIAS, version.version)

    def _evaluation(self, path: Path) -> None:
        """One run per row and protocol; metric names group into the paper's tables."""
        from mlflow.entities import Metric

        from moopd.evaluation.results import read_results

        results = read_results(path)
        for system in results.systems:
            protocol = _protocol(results, system.name)
            run_id = self._run_with(
                EVALUATION, "moopd.row", f"{system.name}/{protocol}",
                {"moopd.run": self._run, "system": system.name}, name=system.title,
            )  # fmt: skip
            metrics = [
                Metric(_metric_name(name), float(value), 0, 0)
                for name, value in results.metrics(system.name).items()
            ]
            for start in range(0, len(metrics), _BATCH):
                self._client.log_batch(run_id, metrics=metrics[start : start + _BATCH])
            self._params(run_id, {"system": system.name, "scale": results.scale})
            self._datasets(run_id, results)
            self._client.set_terminated(run_id, "FINISHED")

    def _datasets(self, run_id: str, results: Any) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = [
            DatasetInput(
                Dataset(name, results.provenance.questions[:32], "local", "questions"),
                [InputTag("mlflow.data.context", f"{size} test questions")],
            )
            for name, size in results.sets.items()
        ]
        self._client.log_inputs(run_id, inputs)


def _protocol(results: Any, system: str) -> str:
    digests = [
        run.protocol for name, run in results.provenance.runs.items()
        if name.rpartition("/")[0] == system
    ]  # fmt: skip
    return digests[0][:16] if digests else "unknown"


def _metric_name(name: str) -> str:
    """MLflow takes letters, digits and _-./ and blanks; nothing of ours but '@' is refused."""
    return name.replace("@", "_at_").replace(":", "_")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
