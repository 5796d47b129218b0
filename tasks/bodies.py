"""What each stage does: reads its inputs, calls moopd, writes into its artifact.

No decisions are made here.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moopd.retrieval.base import Retriever
    from moopd.trainers.loop import TrainingResult, TrainingTask

from moopd.types import CheckpointRef, Question
from tasks.worker import Request

CHECKPOINT = "checkpoint.json"
CORPUS = "corpus.jsonl"


def prepare(request: Request) -> None:
    """Questions per split, manifest, corpus."""
    from moopd.data.manifest import prepare_files, write_prepared
    from moopd.data.world import build_world
    from moopd.retrieval.corpus import find_corpus

    data = request.scale.data
    if data.source == "world":
        world = build_world(data.world)
        write_prepared(world.questions, request.out)
        with (request.out / CORPUS).open("w") as stream:
            for passage in world.passages:
                stream.write(json.dumps(asdict(passage)) + "\n")
        return
    folder = Path(data.path) if data.path else Path()
    prepare_files(data, folder, request.out)
    corpus = find_corpus(Path(data.corpus) if data.corpus else folder)
    suffix = "".join(corpus.suffixes)
    shutil.copyfile(corpus, request.out / f"corpus{suffix}")


def index(request: Request) -> None:
    from moopd.retrieval.build import build_index

    retrieval = request.scale.retrieval
    if retrieval.kind == "remote":
        (request.out / "remote.json").write_text(json.dumps({"url": retrieval.url}))
        return
    work = request.work / "index"
    build_index(retrieval, _corpus(request), work)
    shutil.copytree(work, request.out / "index")


def base(request: Request) -> None:
    from moopd.trainers.base_policy import build_base

    ref = build_base(
        request.scale,
        request.input("prepare"),
        _retriever(request),
        request.out / "policy",
        request.seed,
        request.log,
    )
    _write_ref(request.out / CHECKPOINT, ref)


def train(request: Request) -> None:
    """Stage I or Stage II of one system, resumed from its last checkpoint."""
    from moopd.trainers.assemble import training_task

    assert request.system is not None
    task = training_task(
        request.scale,
        request.system,
        _questions(request, "train"),
        _questions(request, "dev"),
        request.seed,
    )
    base_ref = read_ref(request.input("base"))
    teachers = {name: read_ref(request.input(stage)) for name, stage in request.teachers.items()}
    result = _train_with(request, task, base_ref, teachers)
    for name, ref in (("best", result.best), ("last", result.last)):
        _copy_policy(Path(ref.path), request.out / name)
        _write_ref(request.out / f"{name}.json", ref)
    (request.out / "history.json").write_text(json.dumps(result.history, sort_keys=True))


def _train_with(
    request: Request,
    task: TrainingTask,
    base_ref: CheckpointRef,
    teachers: dict[str, CheckpointRef],
) -> TrainingResult:
    """The loop of this project on one device, or verl as a subprocess."""
    scale, retriever = request.scale, _retriever(request)
    if scale.training.trainer == "verl":
        from moopd.trainers.verl_plugin.launch import train_stage

        return train_stage(scale, task, base_ref, teachers, retriever, request.work, request.log)
    from moopd.trainers.assemble import assemble
    from moopd.trainers.loop import train as run_training

    parts = assemble(scale, task, base_ref, teachers, retriever)
    return run_training(task, parts, request.work, request.log)


def freeze(request: Request) -> None:
    """A policy that nothing writes to any more; its digests are verified on every load."""
    from moopd.trainers.checkpoints import verify

    (source,) = request.inputs.values()
    for name in ("best", "last"):
        values = json.loads((Path(source.path) / f"{name}.json").read_text())
        ref = CheckpointRef(path=f"{source.path}/{name}", **values)
        verify(ref)
        # The path is left out of the bytes: content alone decides what runs again.
        (request.out / f"{name}.json").write_text(json.dumps(values, sort_keys=True))
    (request.out / "source.json").write_text(json.dumps({"stage": source.kind}))
    shutil.copyfile(Path(source.path) / "history.json", request.out / "history.json")
    for name in ("best", "last"):
        shutil.copytree(Path(source.path) / name, request.out / name)


def evaluate(request: Request) -> None:
    """Four attempts at every test question by one row of the tables."""
    from moopd.evaluation import runner
    from moopd.roles.render import Renderer
    from moopd.trainers.assemble import open_policy, open_sampler, prompts_of

    assert request.system is not None
    scale = request.scale
    ref = policy_of(request)
    manifest = json.loads((request.input("prepare") / "manifest.json").read_text())
    task = runner.EvaluationTask(
        system=request.row,
        workflow=request.system.workflow,
        questions=_questions(request, "test"),
        evaluation=scale.evaluation,
        limits=scale.workflow,
        top_k=scale.retrieval.top_k,
        protocol=runner.protocol_digest(
            scale.evaluation, scale.workflow, manifest["sha256"]["test"], ref.sha256
        ),
        seed=request.seed,
        run=request.run,
        max_retrieval_error_share=scale.retrieval.max_error_share,
    )
    policy = open_policy(scale, ref)
    engine = open_sampler(scale, policy, ref)
    renderer = Renderer(policy.tokenizer)
    records = runner.evaluate(
        task, engine, _retriever(request), renderer, prompts_of(scale), request.work,
        _progress(request),
    )  # fmt: skip
    shutil.copyfile(records, request.out / records.name)
    values = {"step": ref.step, "sha256": ref.sha256}
    (request.out / CHECKPOINT).write_text(json.dumps(values, sort_keys=True))


def statistics(request: Request) -> None:
    from tasks.statistics import collect_results

    results = collect_results(request)
    (request.out / "results.json").write_text(results.to_json() + "\n")
    shutil.copyfile(request.input("prepare") / "manifest.json", request.out / "manifest.json")


def report(request: Request) -> None:
    from moopd.evaluation.report import write_report
    from moopd.evaluation.results import read_results

    results = read_results(request.input("statistics") / "results.json")
    write_report(results, request.out)


BODIES: dict[str, Callable[[Request], None]] = {
    "prepare": prepare,
    "index": index,
    "base": base,
    "train": train,
    "freeze": freeze,
    "evaluate": evaluate,
    "statistics": statistics,
    "report": report,
}


def read_ref(folder: Path, choice: str = "best") -> CheckpointRef:
    """The checkpoint of a base artifact, or the chosen one of a frozen artifact."""
    if (folder / CHECKPOINT).is_file():
        values = json.loads((folder / CHECKPOINT).read_text())
        return CheckpointRef(path=str(folder / "policy"), **values)
    values = json.loads((folder / f"{choice}.json").read_text())
    return CheckpointRef(path=str(folder / choice), **values)


def policy_of(request: Request) -> CheckpointRef:
    """The checkpoint that an evaluation stage is about."""
    (policy,) = [name for name in request.inputs if name not in ("prepare", "index")]
    return read_ref(request.input(policy), request.checkpoint)


def _write_ref(file: Path, ref: CheckpointRef) -> None:
    """Without its path: content alone decides what runs again."""
    values = {"system": ref.system, "step": ref.step, "sha256": ref.sha256}
    file.write_text(json.dumps(values, sort_keys=True))


def _copy_policy(source: Path, target: Path) -> None:
    """Weights, config and tokenizer; a frozen policy needs no optimizer."""
    skipped = shutil.ignore_patterns("optimizer.safetensors", "training_state.json")
    shutil.copytree(source, target, ignore=skipped)


def _corpus(request: Request) -> Path:
    return next(request.input("prepare").glob("corpus*"))


def _questions(request: Request, split: str) -> list[Question]:
    from moopd.data.manifest import read_questions

    return read_questions(request.input("prepare") / f"questions_{split}.jsonl")


def _retriever(request: Request) -> Retriever:
    from moopd.retrieval.build import open_retriever

    return open_retriever(request.scale.retrieval, request.input("index") / "index")


def _progress(request: Request) -> Callable[[int, int], None]:
    """At most one line every two seconds, and the last one."""
    last = [0.0]

    def show(done: int, total: int) -> None:
        if done == total or time.monotonic() - last[0] > 2:
            last[0] = time.monotonic()
            request.say(f"{done} of {total} workflows")

    return show
