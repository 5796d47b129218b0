"""SGLang itself, on a GPU: what the fake server promises is what it does.

Needs a CUDA device and sglang 0.5.12; skipped elsewhere.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moopd.config import EngineConfig
from moopd.engines.base import EngineError
from moopd.engines.sglang import SGLangEngine, start_sglang
from moopd.types import CheckpointRef, GenerateRequest, ScoreRequest

pytest.importorskip("sglang")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

TOLERANCE = 0.1
"""Two bfloat16 implementations; random weights give logits of size about 2 (spacing 0.016)."""
PROMPT = tuple((7 * k) % 40000 + 10 for k in range(200))


def policy(seed: int, folder: Path) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model.cuda()


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SGLangEngine, Any]]:
    folder = tmp_path_factory.mktemp("policy")
    model = policy(0, folder)
    options: dict[str, str | int | float | bool] = {
        "mem_fraction_static": 0.1,
        "context_length": 2048,
        "disable_cuda_graph": True,
        "share_memory": True,
    }
    config = EngineConfig(kind="sglang", options=options)
    engine = start_sglang(config, str(folder), lambda ids: " ".join(map(str, ids)), None)
    yield engine, model
    engine.close()


def request(seed: int, **changes: Any) -> GenerateRequest:
    values = {
        "prompt_ids": PROMPT,
        "num_candidates": 1,
        "max_tokens": 12,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": seed,
    }
    return GenerateRequest(**{**values, **changes})


def forward(model: Any, prompt: tuple[int, ...], ids: tuple[int, ...]) -> list[float]:
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *ids]], device="cuda")).logits[0].float()
    table = torch.log_softmax(logits, -1)
    return [table[len(prompt) - 1 + k, token].item() for k, token in enumerate(ids)]


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def test_samples_depend_on_the_seed_and_not_on_the_neighbours(
    started: tuple[SGLangEngine, Any],
) -> None:
    engine, model = started
    [[alone]] = engine.generate([request(5)])
    others = [request(k, prompt_ids=PROMPT[: 50 + k]) for k in range(20, 50)]
    crowd = engine.generate([*others, request(5), request(5, num_candidates=5)])
    assert crowd[30][0].token_ids == alone.token_ids
    assert crowd[31][0].token_ids == alone.token_ids
    assert len({candidate.token_ids for candidate in crowd[31]}) == 5
    assert distance(forward(model, PROMPT, alone.token_ids), alone.logprobs) < TOLERANCE
    assert len(alone.token_ids) == 12


def test_scores_are_those_of_a_forward_pass(started: tuple[SGLangEngine, Any]) -> None:
    engine, model = started
    ids = tuple(range(100, 130))
    [scores] = engine.score([ScoreRequest(PROMPT, ids)])
    assert distance(forward(model, PROMPT, ids), scores) < TOLERANCE
    assert all(math.isfinite(score) for score in scores)


def test_weights_arrive_from_memory_and_from_disk(
    started: tuple[SGLangEngine, Any], tmp_path: Path
) -> None:
    engine, model = started
    other = policy(1, tmp_path)
    greedy = request(0, temperature=0.0)
    before = engine.generate([greedy])[0][0]
    engine.sleep()
    engine.update_weights(other.named_parameters())
    after = engine.generate([greedy])[0][0]
    assert after.token_ids != before.token_ids
    assert distance(forward(other, PROMPT, after.token_ids), after.logprobs) < TOLERANCE
    engine.update_weights(model.named_parameters())
    assert engine.generate([greedy])[0][0].token_ids == before.token_ids
    engine.load_weights(CheckpointRef("x", 1, str(tmp_path), "0" * 64))
    assert engine.generate([greedy])[0][0].token_ids == after.token_ids


def test_a_killed_worker_is_an_engine_error(started: tuple[SGLangEngine, Any]) -> None:
    engine, _ = started
    for pid in engine._transport._engine.get_all_child_pids():  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError):
        engine.generate([request(1)])
