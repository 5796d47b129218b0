"""Workflows at temperature 0: the local engine and SGLang write the same trajectories.

Without a GPU SGLang is a server that speaks its protocol; with one it is SGLang itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moopd.config import EngineConfig, WorkflowConfig
from moopd.data.normalize import exact_match
from moopd.engines.base import Engine
from moopd.engines.local import LocalEngine
from moopd.engines.sglang import SGLangEngine, start_sglang
from moopd.types import ScoreRequest, Trajectory
from moopd.workflows.rollout import Job, run_workflows
from tests.engines.fake_sglang import FakeSGLang
from tests.support import OnePassage, team, tiny_policy, word_tokenizer
from tests.trainers.verl_plugin.scene import examples, questions, teach

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"cpu": 1e-4, "cuda": 0.15}
"""Largest difference of a token's log-probability: float32, and two bfloat16 implementations."""
SAME = {"cpu": 1.0, "cuda": 0.9}
"""Share of workflows that must be equal token by token: bfloat16 may turn a close choice."""
TOKENIZER = word_tokenizer()


def policy() -> Any:
    """A small model that was shown scripted workflows, so that its teams search and answer."""
    # SGLang's kernels want heads of 64, and it ends a completion at the config's end token.
    model = tiny_policy(
        TOKENIZER,
        hidden_size=128,
        intermediate_size=256,
        head_dim=64,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        bos_token_id=None,
    ).to(DEVICE)
    teach(model, examples(), steps=60, lr=3e-3)
    return (model.bfloat16() if DEVICE == "cuda" else model).eval()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalEngine, SGLangEngine]]:
    model = policy()
    eos = TOKENIZER.eos_token_id
    local = LocalEngine(model, TOKENIZER)
    if DEVICE == "cpu":
        with FakeSGLang(model, eos) as fake:
            config = EngineConfig(kind="sglang", url=fake.url)
            yield local, start_sglang(config, "", TOKENIZER.decode, eos)
        return
    pytest.importorskip("sglang")
    folder: Path = tmp_path_factory.mktemp("policy")
    model.save_pretrained(folder)
    options: dict[str, Any] = {"mem_fraction_static": 0.1, "context_length": 1024,
                               "disable_cuda_graph": True}  # fmt: skip
    config = EngineConfig(kind="sglang", options=options)
    started = start_sglang(config, str(folder), TOKENIZER.decode, eos)
    yield local, started
    started.close()


def greedy(engine: Engine, workflow: str) -> list[Trajectory]:
    limits = WorkflowConfig(max_input_tokens=512, max_output_tokens=16, hierarchy_steps=6)
    players = team(workflow, TOKENIZER, 2, limits, temperature=0.0)
    asked = [replace(q, answers=("xy"[n % 2],)) for n, q in enumerate(questions(10))]
    jobs = [Job(question, 0, seed=n) for n, question in enumerate(asked)]
    return run_workflows(jobs, players, engine, OnePassage())


def tokens(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [c.token_ids for call in trajectory.calls for c in call.completions]


def scores(of: Sequence[Trajectory]) -> list[list[bool]]:
    return [[exact_match(answer, t.question.answers) for answer in t.answers] for t in of]


@pytest.mark.parametrize("workflow", ["cascade", "hierarchy"])
def test_greedy_workflows_and_their_scores_are_those_of_the_local_engine(
    engines: tuple[LocalEngine, SGLangEngine], workflow: str
) -> None:
    local, sglang = engines
    ours, theirs = greedy(local, workflow), greedy(sglang, workflow)
    same = [tokens(a) == tokens(b) for a, b in zip(ours, theirs, strict=True)]
    assert sum(same) >= SAME[DEVICE] * len(same)
    alike = [a == b for a, b in zip(scores(ours), scores(theirs), strict=True)]
    assert sum(alike) >= SAME[DEVICE] * len(alike)
    # Some teams are right and some are wrong, or equal scores would say nothing.
    assert any(t.retrievals for t in theirs)
    assert {any(of_team) for of_team in scores(theirs)} == {True, False}


def test_the_local_engine_gives_sglangs_tokens_the_same_logprobs(
    engines: tuple[LocalEngine, SGLangEngine],
) -> None:
    local, sglang = engines
    calls = [call for t in greedy(sglang, "hierarchy") for call in t.calls]
    said = [(call.prompt_ids, completion) for call in calls for completion in call.completions]
    requests = [ScoreRequest(prompt, completion.token_ids) for prompt, completion in said]
    reported = [value for _, completion in said for value in completion.logprobs]
    for other in (local.score(requests), sglang.score(requests)):
        values = [value for row in other for value in row]
        assert max(abs(a - b) for a, b in zip(values, reported, strict=True)) < TOLERANCE[DEVICE]
