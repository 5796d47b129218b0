"""What benchmarks.gpu measures with: a clock, scripted workflows, random models."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import random
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from moopd.config import SamplingConfig, TrainingConfig, WorkflowConfig
from moopd.engines.sglang import SGLangEngine
from moopd.roles.prompts import WORDINGS, Prompts
from moopd.roles.render import Renderer
from moopd.types import (
    Completion,
    GenerateRequest,
    Message,
    Passage,
    Question,
    Role,
)
from moopd.workflows.rollout import Team

SHAPES: dict[str, dict[str, int]] = {
    "qwen3-4b": {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
                 "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                 "head_dim": 128},
    "qwen3-0.6b": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
                   "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
                   "head_dim": 128},
    "tiny": {"vocab_size": 49152, "hidden_size": 32, "intermediate_size": 64,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
             "head_dim": 8},
}  # fmt: skip


T = TypeVar("T")

LENGTHS = {Role.LEADER: (30, 60), Role.SEARCHER: (20, 110), Role.ANSWERER: (8, 20)}
"""Sampled tokens per completion, about the paper's 697 a workflow (appendix B.2)."""


@dataclass
class Clock:
    """Named seconds, device work included."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        wait()
        start = time.perf_counter()
        yield
        wait()
        self.seconds[name] = time.perf_counter() - start
        print(f"[{name}] {self.seconds[name]:.2f} s", flush=True)


def show(figures: dict[str, float]) -> None:
    """What is known so far, should a later part fail."""
    for name, value in figures.items():
        print(f"  {name} = {value:.4g}", flush=True)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class RandomTokens:
    """Stands in for an engine where the update alone is measured: tokens drawn at random."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    async def complete(self, request: GenerateRequest) -> tuple[Completion, ...]:
        draw = random.Random(request.seed)
        flat = -math.log(self._vocab_size)
        drawn = [
            tuple(draw.randrange(self._vocab_size) for _ in range(request.max_tokens))
            for _ in range(request.num_candidates)
        ]
        return tuple(Completion(ids, (flat,) * len(ids), "", "length") for ids in drawn)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    def sleep(self) -> None: ...

    def close(self) -> None: ...


Sampler = SGLangEngine | RandomTokens


@dataclass
class ScriptedWords:
    """Samples real tokens of scripted lengths and lets them say what a full workflow says."""

    engine: Sampler
    roles: dict[Role, tuple[int, ...]]
    """First prompt ids of each role."""
    topics: Sequence[str]
    seen: list[GenerateRequest] = field(default_factory=list)
    turns: dict[tuple[int, int], int] = field(default_factory=dict)

    async def complete(self, request: GenerateRequest) -> tuple[Completion, ...]:
        role = next(
            role for role, ids in self.roles.items() if request.prompt_ids[: len(ids)] == ids
        )
        assert request.conversation_key is not None
        turn = self.turns.get(request.conversation_key, 0)
        self.turns[request.conversation_key] = turn + 1
        draw = random.Random(request.seed)
        request = replace(request, max_tokens=draw.randint(*LENGTHS[role]))
        self.seen.append(request)
        text = self._text(role, turn, draw)
        return tuple(
            replace(completion, text=text, finish="stop")
            for completion in await self.engine.complete(request)
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.engine.run(work)

    def end_conversations(self) -> None:
        self.turns.clear()

    def generate(self, requests: Sequence[GenerateRequest]) -> Any:
        raise NotImplementedError("driven request by request")

    def score(self, requests: Any) -> Any:
        raise NotImplementedError("the trainer scores")

    def load_weights(self, checkpoint: Any) -> None:
        raise NotImplementedError("weights come from the trainer")

    def _text(self, role: Role, turn: int, draw: random.Random) -> str:
        topic = draw.choice(self.topics)
        if role is Role.ANSWERER:
            return f"<answer>{topic}</answer>"
        if role is Role.SEARCHER:
            return f"<search>{topic}</search>" if turn < 1 else f"<report>{topic}</report>"
        tasks = {0: 3, 1: 2}.get(turn, 0)
        return "".join(f"<task>{draw.choice(self.topics)}</task>" for _ in range(tasks)) or (
            "<select>1, 2, 3</select>"
        )


def random_config(shape: str, folder: Path) -> Any:
    from transformers import Qwen3Config

    config = Qwen3Config(
        **SHAPES[shape],
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    return config


def random_model(config: Any, device: str) -> Any:
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def scripted_team(
    engine: Sampler, tokenizer: Any, training: TrainingConfig, retriever: TitleRetriever
) -> tuple[ScriptedWords, Team]:
    renderer = Renderer(tokenizer)
    prompts = Prompts("chat")
    team = Team(
        "hierarchy",
        WorkflowConfig(),
        prompts,
        renderer,
        SamplingConfig(),
        training.num_candidates,
        top_k=3,
    )
    roles = {}
    for role in LENGTHS:
        messages = [Message("system", WORDINGS["chat"].system[role]), Message("user", "")]
        ids = renderer.start(messages)
        other = renderer.start([messages[0], Message("user", "x")])
        common = next(k for k, (a, b) in enumerate(zip(ids, other, strict=False)) if a != b)
        roles[role] = ids[:common]
    return ScriptedWords(engine, roles, retriever.titles), team


@dataclass
class TitleRetriever:
    """Exact look-up by title, then any passages: retrieval has benchmarks of its own."""

    passages: Sequence[Passage]

    def __post_init__(self) -> None:
        self.titles = [p.title for p in self.passages]
        self._place = {title: k for k, title in enumerate(self.titles)}

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        found = []
        for query in queries:
            first = self._place.get(query, len(query) % len(self.passages))
            found.append([self.passages[(first + k) % len(self.passages)] for k in range(top_k)])
        return found


def read_data(folder: Path, num_questions: int) -> tuple[list[Question], TitleRetriever]:
    rows = _lines(folder / "corpus.jsonl.gz")
    passages = [
        Passage(str(row["id"]), str(row["title"]), str(row["text"])) for row in rows[:20000]
    ]
    questions = [
        Question(f"q{n}", "nq", str(row["question"]), ("x",))
        for n, row in enumerate(_lines(folder / "questions.jsonl.gz")[:num_questions])
    ]
    return questions, TitleRetriever(passages)


def _lines(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        return [json.loads(line) for line in stream]
