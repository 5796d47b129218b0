"""The base policy of a scale: an instruct model as it is, or one warmed up on scripted traces."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moopd.config import ConfigError, SamplingConfig, Scale
from moopd.data.manifest import read_questions
from moopd.data.world import World, build_world, practice_world
from moopd.engines.local import LocalEngine
from moopd.engines.models import load_policy
from moopd.engines.tiny_model import build_tiny
from moopd.retrieval.base import Retriever
from moopd.retrieval.build import build_index, open_retriever
from moopd.retrieval.corpus import find_corpus, read_passages
from moopd.rl.critic import PolicyJudge
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.systems import BASE
from moopd.trainers.checkpoints import reference, save_policy
from moopd.trainers.critic_check import Agreement, critic_agreement
from moopd.trainers.support_player import support_sequences
from moopd.trainers.traces import TraceSequence
from moopd.trainers.warm_start import warm_start
from moopd.trainers.world_player import world_sequences
from moopd.types import CheckpointRef
from moopd.workflows.rollout import Team, derive_seed

Log = Callable[[int, dict[str, float]], None]
_QUESTIONS_PER_WORLD = 900


def build_base(
    scale: Scale, prepared: Path, retriever: Retriever, out: Path, seed: int, log: Log
) -> CheckpointRef:
    """Build and save the base policy under `out`. `prepared`: the folder of data preparation."""
    model, tokenizer = _open(scale, seed)
    if scale.warm_start.enabled and scale.warm_start.steps:
        teams = _teams(scale, tokenizer)
        rng = random.Random(seed)
        if scale.model.kind == "tiny":
            with TemporaryDirectory() as folder:
                traces = _world_traces(scale, teams, rng, Path(folder))
        else:
            traces = _support_traces(scale, teams, prepared, retriever, rng)
        warm_start(model, tokenizer.pad_token_id, traces, scale.warm_start, seed, log)
    if scale.model.kind == "tiny" and scale.critic.kind == "base_model":
        log(scale.warm_start.steps, _judge_check(scale, model, tokenizer, seed).metrics())
    save_policy(model, tokenizer, out)
    return reference(BASE, 0, out)


def _open(scale: Scale, seed: int) -> tuple[Any, Any]:
    if scale.model.kind == "tiny":
        return build_tiny(scale.model, derive_seed(seed, 7))
    if not scale.model.path:
        raise ConfigError(
            "model.path is empty; expected a transformers folder, a hub name or a GGUF file "
            "(--set model.path=...)"
        )
    from moopd.trainers.assemble import resolve_device

    return load_policy(scale.model.path, "float32", resolve_device(scale.engine.device))


def _teams(scale: Scale, tokenizer: Any) -> list[Team]:
    """One team per workflow kind; a script samples nothing."""
    prompts = Prompts(scale.model.prompt_style, scale.workflow.max_passage_words)
    renderer = Renderer(tokenizer)
    return [
        Team(kind, scale.workflow, prompts, renderer, SamplingConfig(), 1, scale.retrieval.top_k)
        for kind in ("cascade", "hierarchy")
    ]


def _world_traces(
    scale: Scale, teams: list[Team], rng: random.Random, folder: Path
) -> list[TraceSequence]:
    """Traces of both workflows in fresh worlds that share no fact with the evaluated one."""
    evaluated = build_world(scale.data.world)
    num_worlds = -(-scale.warm_start.num_traces // (2 * _QUESTIONS_PER_WORLD))
    traces: list[TraceSequence] = []
    for number in range(num_worlds):
        world = practice_world(
            derive_seed(scale.data.world.seed, number),
            scale.data.world.num_entities,
            min(_QUESTIONS_PER_WORLD, scale.warm_start.num_traces // 2),
            evaluated,
        )
        own = _index_world(scale, world, folder / str(number))
        for team in teams:
            traces += world_sequences(world, team, scale.warm_start.noise, own, rng)
    return traces


def _judge_check(scale: Scale, model: Any, tokenizer: Any, seed: int) -> Agreement:
    """The critic row's judge against the truth of a world it has not practised on."""
    hierarchy = _teams(scale, tokenizer)[1]
    judge = PolicyJudge(
        LocalEngine(model, tokenizer), hierarchy.renderer, hierarchy.prompts, scale.workflow,
        scale.critic,
    )  # fmt: skip
    world = practice_world(
        derive_seed(scale.data.world.seed, 1, 0), scale.data.world.num_entities, 200,
        build_world(scale.data.world),
    )  # fmt: skip
    with TemporaryDirectory() as folder:
        retriever = _index_world(scale, world, Path(folder))
        return critic_agreement(judge, world, hierarchy, retriever, scale.warm_start.noise, seed)


def _index_world(scale: Scale, world: World, folder: Path) -> Retriever:
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "corpus.jsonl"
    with corpus.open("w") as stream:
        for passage in world.passages:
            row = {"id": passage.id, "title": passage.title, "text": passage.text}
            stream.write(json.dumps(row) + "\n")
    build_index(scale.retrieval, corpus, folder / "index")
    return open_retriever(scale.retrieval, folder / "index")


def _support_traces(
    scale: Scale, teams: list[Team], prepared: Path, retriever: Retriever, rng: random.Random
) -> list[TraceSequence]:
    """Traces of both workflows on training questions whose supporting passages are known."""
    passages = {p.id: p for p in read_passages(find_corpus(prepared))}
    questions = [
        question
        for question in read_questions(prepared / "questions_train.jsonl")
        if any(identity in passages for identity in question.support_ids)
    ]
    rng.shuffle(questions)
    chosen = questions[: max(1, scale.warm_start.num_traces // 2)]
    return list(
        chain.from_iterable(support_sequences(chosen, passages, team, retriever) for team in teams)
    )
