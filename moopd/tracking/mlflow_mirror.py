"""Mirrors the journal into MLflow: step by step, idempotent, with its own times."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moopd.tracking import journal
from moopd.tracking.journal import Event
from moopd.tracking.store import (
    EVALUATION,
    PIPELINE,
    Point,
    Store,
    comparison_page,
    locked,
    write_json,
)

if TYPE_CHECKING:
    from moopd.evaluation.results import Results

TEACHER = "moopd-teacher"
ALIAS = "frozen"
_NEEDS = {
    "run_started": ("scale",),
    "stage_started": ("attempt",),
    "metrics": ("stage", "attempt", "step", "values"),
    "stage_finished": ("attempt", "sha256", "path", "seconds"),
    "stage_failed": ("attempt", "error"),
    "stage_cached": ("origin",),
    "run_finished": ("state",),
}
_STATES = {"finished": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}


class Mirror:
    """One MLflow store under `folder`; `sync` brings it up to the journal."""

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        self._store = Store(folder, uri)
        self.uri = self._store.uri
        self._synced = self._store.folder / "synced"
        self._synced.mkdir(exist_ok=True)

    def sync(self, journals: Path) -> int:
        """Replay what is new in every journal; the number of events taken over.

        A run that cannot be taken over does not keep the others out; its error is raised at the
        end.
        """
        failure: Exception | None = None
        events = 0
        with locked(self._store.folder / "sync.lock"):
            for run in journal.runs(journals):
                try:
                    events += self._sync_run(journals / f"{run}.jsonl")
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        return events

    def comparison_path(self) -> str:
        """Path of the page that compares the evaluated systems."""
        return comparison_page(self._store.experiments[EVALUATION])

    def _sync_run(self, path: Path) -> int:
        state_file = self._synced / f"{path.stem}.json"
        offset = _offset(state_file)
        if path.stat().st_size <= offset:
            return 0
        events, reached = journal.read_from(path, offset)
        replay = _Replay(self._store, path.stem, journal.first(path))
        for event in events:
            replay.take(event)
        replay.flush()
        write_json(state_file, {"offset": reached})
        return len(events)


def _offset(state_file: Path) -> int:
    """Bytes mirrored so far. An unreadable state means a full replay, which changes nothing."""
    try:
        return int(json.loads(state_file.read_text())["offset"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


class _Replay:
    """Takes the events of one pipeline run over into MLflow."""

    def __init__(self, store: Store, run: str, head: Event) -> None:
        self._store = store
        self._run = run
        self._head = head
        self._pending: dict[str, list[Point]] = {}
        self._cached: dict[str, str] = {}

    def take(self, event: Event) -> None:
        handler = getattr(self, f"_on_{event['event']}", None)
        # One that lacks something would keep all that follows out for ever.
        if handler is not None and all(name in event for name in _NEEDS.get(event["event"], ())):
            handler(event)

    def flush(self) -> None:
        for run_id, points in self._pending.items():
            self._store.metrics(run_id, points)
        self._pending.clear()
        if self._cached:
            self._store.tags(self._parent(), self._cached)
            self._cached = {}

    def _on_run_started(self, event: Event) -> None:
        parent = self._parent()
        name = event["scale"].get("name", "?")
        self._store.params(parent, {"scale": name, **_flat(event["scale"])})
        self._store.client.log_dict(parent, event["scale"], "config.json")

    def _on_stage_started(self, event: Event) -> None:
        child = self._child(event)
        plain: dict[str, Any] = {
            name: event[name] for name in ("stage", "key", "seed") if name in event
        }
        self._store.params(child, {**plain, **_flat(event.get("reads", {}))})
        self._store.client.log_dict(child, event.get("reads", {}), "config.json")

    def _on_metrics(self, event: Event) -> None:
        stamp = _milliseconds(event)
        self._pending.setdefault(self._child(event), []).extend(
            (name, float(value), stamp, int(event["step"]))
            for name, value in event["values"].items()
            if isinstance(value, (int, float))
        )

    def _on_stage_finished(self, event: Event) -> None:
        self.flush()
        child = self._child(event)
        self._store.tags(child, {f"moopd.{name}": event[name] for name in ("sha256", "path")})
        folder = Path(event["path"])
        if folder.is_dir():
            self._store.upload(child, folder)
            if event["stage"] == "prepare":
                self._datasets(child, folder)
            if event["stage"].startswith("freeze/"):
                name = f"{TEACHER}-{event['stage'].removeprefix('freeze/').replace('/', '-')}"
                self._store.register(name, ALIAS, child, event["path"], event["sha256"])
            if event["stage"] == "statistics":
                self._evaluation(folder, event)
            if event["stage"] == "report":
                self._report(folder, event)
        self._store.metrics(child, [("seconds", event["seconds"], _milliseconds(event), 0)])
        self._store.end(child, "FINISHED", _milliseconds(event))

    def _on_stage_failed(self, event: Event) -> None:
        self.flush()
        child = self._child(event)
        self._store.tags(child, {"moopd.error": event["error"]})
        state = "KILLED" if event.get("cancelled") else "FAILED"
        self._store.end(child, state, _milliseconds(event))

    def _on_stage_cached(self, event: Event) -> None:
        """Linked to the run that computed it."""
        self._cached[f"moopd.cached.{event['stage'].replace('/', '.')}"] = event["origin"]

    def _on_run_finished(self, event: Event) -> None:
        self._end(_STATES.get(event["state"], "FAILED"), event)

    def _on_run_lost(self, event: Event) -> None:
        self._end("KILLED", event)

    def _end(self, state: str, event: Event) -> None:
        self.flush()
        for run in self._store.search(PIPELINE, f"tags.`moopd.run` = '{self._run}'"):
            if run.info.status == "RUNNING":
                child = "mlflow.parentRunId" in run.data.tags
                self._store.end(run.info.run_id, "KILLED" if child else state, _milliseconds(event))

    def _parent(self) -> str:
        tags = {"moopd.run": self._run, **self._origin()}
        start = _milliseconds(self._head)
        return self._store.run_with(PIPELINE, "moopd.parent", self._run, tags, self._run, start)

    def _child(self, event: Event) -> str:
        tags = {
            "moopd.run": self._run,
            "moopd.stage": event["stage"],
            "mlflow.parentRunId": self._parent(),
            **self._origin(),
        }
        return self._store.run_with(
            PIPELINE, "moopd.attempt", event["attempt"], tags, event["stage"], _milliseconds(event)
        )

    def _origin(self) -> dict[str, str]:
        """Commit and environment, on every run."""
        environment = self._head.get("environment", {})
        return {
            "mlflow.source.git.commit": str(self._head.get("commit", "")),
            **{f"moopd.env.{name}": str(value) for name, value in environment.items()},
        }

    def _datasets(self, run_id: str, folder: Path) -> None:
        manifest = folder / "manifest.json"
        if manifest.is_file():
            for split, digest in json.loads(manifest.read_text())["sha256"].items():
                self._store.dataset(run_id, f"questions/{split}", digest, split)

    def _evaluation(self, folder: Path, event: Event) -> None:
        """One run per row and protocol; metric names group into the paper's tables."""
        from moopd.evaluation.results import read_results

        results = read_results(folder / "results.json")
        stamp = _milliseconds(event)
        self._store.upload(self._parent(), folder, "manifest.json")
        for system in results.systems:
            run_id = self._row(results, system.name, stamp)
            self._store.metrics(
                run_id,
                [(name, float(v), stamp, 0) for name, v in results.metrics(system.name).items()],
            )
            self._store.params(
                run_id,
                {"system": system.name, "protocol": _protocol(results, system.name),
                 "scale": results.scale, **_flat(self._head.get("scale", {}))},
            )  # fmt: skip
            for name, size in results.sets.items():
                digest = results.provenance.questions
                self._store.dataset(run_id, name, digest, f"{size} test questions")
            self._store.client.log_dict(run_id, self._head.get("scale", {}), "config.json")
            self._store.upload(run_id, folder, "manifest.json")
            self._store.end(run_id, "FINISHED", stamp)

    def _report(self, folder: Path, event: Event) -> None:
        """The report and its figures, on the pipeline run and on every row that it is about."""
        from moopd.evaluation.results import read_results

        results = read_results(folder / "report.json")
        rows = [self._row(results, s.name, _milliseconds(event)) for s in results.systems]
        for run_id in (self._parent(), *rows):
            self._store.upload(run_id, folder)
        for run_id in rows:
            self._store.end(run_id, "FINISHED", _milliseconds(event))

    def _row(self, results: Results, name: str, stamp: int) -> str:
        """The evaluation run of a row under its protocol."""
        protocol = _protocol(results, name)
        tags = {"moopd.run": self._run, "system": name, "protocol": protocol, **self._origin()}
        return self._store.run_with(
            EVALUATION, "moopd.row", f"{name}/{protocol}", tags, results.title(name), stamp
        )


def _milliseconds(event: Event) -> int:
    return int(event.get("time", 0) * 1000)


def _protocol(results: Results, system: str) -> str:
    digests = [
        run.protocol for name, run in results.provenance.runs.items()
        if name.rpartition("/")[0] == system
    ]  # fmt: skip
    return digests[0][:16] if digests else "unknown"


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
