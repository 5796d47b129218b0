"""Gathers records, curves and digests of all rows and runs, and analyses them."""

from __future__ import annotations

import json
from pathlib import Path

from moopd.data.manifest import read_questions
from moopd.evaluation.analysis import RecordsInput, analyse, curve_points
from moopd.evaluation.records import read_table
from moopd.evaluation.results import CurvePoint, Provenance, Results, RunProvenance
from tasks.keys import source_digest
from tasks.worker import Request


def collect_results(request: Request) -> Results:
    evaluations = {n: request.input(n) for n in request.inputs if n.startswith("evaluate/")}
    inputs = [_records(request, name, folder) for name, folder in evaluations.items()]
    return analyse(
        inputs,
        read_questions(request.input("prepare") / "questions_test.jsonl"),
        request.systems,
        request.scale.statistics,
        provenance=_provenance(request),
        curves=_curves(request),
        scale=request.scale,
        num_attempts=request.scale.evaluation.attempts,
    )


def _records(request: Request, name: str, folder: Path) -> RecordsInput:
    (path,) = folder.glob("records*.parquet")
    checkpoint = json.loads((folder / "checkpoint.json").read_text())
    own = RunProvenance(
        records=request.inputs[name].sha256, checkpoint=checkpoint["sha256"],
        step=checkpoint["step"],
    )  # fmt: skip
    return RecordsInput(read_table(path), own)


def _provenance(request: Request) -> Provenance:
    manifest = json.loads((request.input("prepare") / "manifest.json").read_text())
    return Provenance(
        config=request.scale.digest(),
        manifest=manifest["sha256"]["all"],
        questions=manifest["sha256"]["test"],
        index=request.inputs["index"].sha256,
        code=source_digest("moopd"),
    )


def _curves(request: Request) -> list[CurvePoint]:
    points: list[CurvePoint] = []
    for name in request.inputs:
        if name.startswith("freeze/"):
            system, _, run = name.removeprefix("freeze/").partition("/")
            history = json.loads((request.input(name) / "history.json").read_text())
            points += curve_points(system, int(run or 0), history)
    return points
