"""Rules: tokens depend on prompt and seed alone; log-probabilities are those of a full forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moopd.engines.kv_cache import KVCache
from moopd.engines.local import LocalEngine
from moopd.engines.models import load_policy
from moopd.engines.rows import merge_prefixes
from moopd.engines.sampling import choose, uniforms
from moopd.trainers.checkpoints import reference, save_policy
from moopd.types import Completion, GenerateRequest, ScoreRequest
from tests.support import OnePassage, team, tiny_policy, word_tokenizer

TOKENIZER = word_tokenizer()
MODEL = tiny_policy(TOKENIZER)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        )
    ).eval()  # fmt: skip


def requests_200() -> list[GenerateRequest]:
    """Mixed lengths, candidates, temperatures and top-p."""
    rng = np.random.default_rng(0)
    return [
        GenerateRequest(
            prompt_ids=tuple(rng.integers(0, 45, rng.integers(2, 40)).tolist()),
            num_candidates=int(rng.choice([1, 5])),
            max_tokens=12,
            temperature=float(rng.choice([0.0, 0.6, 1.0])),
            top_p=float(rng.choice([0.9, 1.0])),
            seed=int(rng.integers(1 << 60)),
        )
        for _ in range(200)
    ]


def run(model: Any, requests: Sequence[GenerateRequest], size: int) -> list[Completion]:
    engine = LocalEngine(model, TOKENIZER)
    blocks = [requests[k : k + size] for k in range(0, len(requests), size)]
    return [c for block in blocks for group in engine.generate(block) for c in group]


def test_same_tokens_at_batch_sizes_1_7_and_64() -> None:
    requests = requests_200()
    alone, seven, many = (run(MODEL, requests, size) for size in (1, 7, 64))
    assert [c.token_ids for c in alone] == [c.token_ids for c in seven]
    assert [c.token_ids for c in alone] == [c.token_ids for c in many]
    for one, other in zip(alone, many, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("make", [lambda: MODEL, llama])
def test_sampled_logprobs_equal_a_full_forward(make: Any) -> None:
    model = make()
    for request in requests_200()[:20]:
        for completion in LocalEngine(model, TOKENIZER).generate([request])[0]:
            ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                log_p = torch.log_softmax(model(ids).logits[0].float(), -1)
            start = len(request.prompt_ids) - 1
            full = [log_p[start + k, t].item() for k, t in enumerate(completion.token_ids)]
            assert completion.logprobs == pytest.approx(full, abs=1e-4)


def test_candidates_differ_and_seeds_decide() -> None:
    request = GenerateRequest((30, 31), 5, 8, 1.0, 1.0, seed=1)
    engine = LocalEngine(MODEL, TOKENIZER)
    (five,) = engine.generate([request])
    assert len({c.token_ids for c in five}) > 1
    assert engine.generate([request]) == [five]


def test_kept_conversations_change_nothing() -> None:
    """The same workflows with and without the KV cache between turns."""
    from moopd.types import Question
    from moopd.workflows.rollout import Job, run_workflows

    class Forgetful(LocalEngine):
        def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
            self.end_conversations()
            return super().generate(requests)

    jobs = [Job(Question(f"q{n}", "nq", f"who {w}", ("x",)), n, n) for n, w in enumerate("abcde")]
    # A random policy malforms nearly every turn, so conversations grow to the step budget.
    setting = team("cascade", TOKENIZER, num_candidates=5)
    kept = run_workflows(jobs, setting, LocalEngine(MODEL, TOKENIZER), OnePassage())
    fresh = run_workflows(jobs, setting, Forgetful(MODEL, TOKENIZER), OnePassage())
    assert [t.num_steps for t in kept] == [t.num_steps for t in fresh]
    pairs = [
        (a, b)
        for t, u in zip(kept, fresh, strict=True)
        for c, d in zip(t.calls, u.calls, strict=True)
        for a, b in zip(c.completions, d.completions, strict=True)
    ]
    assert len(pairs) > 20
    for a, b in pairs:
        assert a.token_ids == b.token_ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


def test_scores_keep_their_place_whatever_the_padding() -> None:
    engine = LocalEngine(MODEL, TOKENIZER)
    requests = [
        ScoreRequest((25, 26), (27, 28, 29)),
        ScoreRequest((30,) * 9, (31,)),
        ScoreRequest((25, 26, 27), (28, 29, 33)),
        ScoreRequest((25, 26), (27, 28, 29)),
    ]
    for request, got in zip(requests, engine.score(requests), strict=True):
        ids = torch.tensor([[*request.prompt_ids, *request.token_ids]])
        with torch.no_grad():
            log_p = torch.log_softmax(MODEL(ids).logits[0].float(), -1)
        start = len(request.prompt_ids) - 1
        full = [log_p[start + k, t].item() for k, t in enumerate(request.token_ids)]
        assert got == pytest.approx(full, abs=1e-5)


def test_inverse_cdf_and_nucleus_by_hand() -> None:
    # probabilities 0.5, 0.3, 0.2; the nucleus of 0.7 keeps the first two, rescaled 0.625, 0.375
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(6, 1)
    top_p = torch.tensor([1.0, 1.0, 1.0, 0.7, 0.7, 1.0])
    temperature = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    uniform = torch.tensor([0.49, 0.51, 0.81, 0.62, 0.99, 0.99], dtype=torch.float64)
    assert choose(logits, temperature, top_p, uniform).tolist() == [0, 1, 2, 0, 1, 0]


def test_uniforms_are_uniform_and_independent_of_neighbours() -> None:
    seeds = np.arange(20_000, dtype=np.uint64)
    zeros = np.zeros_like(seeds)
    draws = uniforms(seeds, zeros, 3)
    # Standard error of the mean 0.289 / sqrt(20,000) = 0.002.
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(draws, uniforms(seeds, zeros, 4))[0, 1]) < 0.03
    assert uniforms(seeds[5:6], zeros[:1], 3)[0] == draws[5]


def test_prefixes_ride_in_longer_rows() -> None:
    rows, row_of = merge_prefixes([(1, 2), (1, 2, 3), (1, 3), (1, 2)])
    assert [rows[row] for row in row_of] == [(1, 2, 3), (1, 2, 3), (1, 3), (1, 2, 3)]
    assert len(rows) == 2


def test_weights_are_swapped_in_place(tmp_path: Any) -> None:
    save_policy(tiny_policy(TOKENIZER, seed=5), TOKENIZER, tmp_path / "other")
    engine = LocalEngine(tiny_policy(TOKENIZER), TOKENIZER)
    request = ScoreRequest((25,), (26, 27))
    before = engine.score([request])
    engine.load_weights(reference("s", 1, tmp_path / "other"))
    assert engine.score([request]) != before
    assert engine.score([request]) == LocalEngine(
        load_policy(str(tmp_path / "other"))[0], TOKENIZER
    ).score([request])


def two_turns(engine: LocalEngine, between: Any = None) -> list[list[Completion]]:
    """30 conversations: one turn, then what it said and a few new tokens as the next prompt."""
    rng = np.random.default_rng(1)
    first = [
        GenerateRequest(
            tuple(rng.integers(0, 45, rng.integers(2, 40)).tolist()), 1, 12, 1.0, 1.0, n, (n, 0)
        )
        for n in range(30)
    ]
    said = [c for (c,) in engine.generate(first)]
    if between is not None:
        between()
    second = [
        replace(r, prompt_ids=(*r.prompt_ids, *c.token_ids, 7, 8, 9), seed=r.seed + 100)
        for r, c in zip(first, said, strict=True)
    ]
    return [said, [c for (c,) in engine.generate(second)]]


@pytest.mark.parametrize("num_tokens", [1, 60, 300])
def test_a_small_cache_changes_no_token(num_tokens: int) -> None:
    # Two layers, keys and values, two heads of 8 float32 numbers: 2 * 2 * 2 * 8 * 4 = 256 bytes.
    small = LocalEngine(MODEL, TOKENIZER, cache_bytes=num_tokens * 256)
    for got, wanted in zip(two_turns(small), two_turns(LocalEngine(MODEL, TOKENIZER)), strict=True):
        assert [c.token_ids for c in got] == [c.token_ids for c in wanted]
        for a, b in zip(got, wanted, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    assert small._conversations.num_bytes <= num_tokens * 256


def test_what_decodes_at_once_fits_the_cache_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    columns: list[int] = []
    build = KVCache.of.__func__  # type: ignore[attr-defined]

    def watched(cls: type[KVCache], kept: Sequence[torch.Tensor], *rest: Any) -> KVCache:
        cache: KVCache = build(cls, kept, *rest)
        columns.append(len(kept) * cache.valid.shape[1])
        return cache

    monkeypatch.setattr(KVCache, "of", classmethod(watched))
    LocalEngine(MODEL, TOKENIZER, cache_bytes=400 * 256).generate(requests_200())
    assert max(columns) <= 400


def test_kept_keys_are_really_used_and_only_for_their_own_prefix() -> None:
    fresh = two_turns(LocalEngine(MODEL, TOKENIZER))[1]
    engine = LocalEngine(MODEL, TOKENIZER)

    def spoil() -> None:
        for kept in engine._conversations._kept.values():
            kept.planes = torch.zeros_like(kept.planes)

    spoiled = two_turns(engine, spoil)[1]
    assert [c.logprobs for c in spoiled] != [c.logprobs for c in fresh]
    other = GenerateRequest((44, 43, 42, 41), 1, 12, 1.0, 1.0, seed=5, conversation_key=(0, 0))
    assert engine.generate([other]) == LocalEngine(MODEL, TOKENIZER).generate([other])


def test_new_weights_forget_what_was_kept(tmp_path: Path) -> None:
    save_policy(tiny_policy(TOKENIZER, seed=5), TOKENIZER, tmp_path / "other")
    engine = LocalEngine(tiny_policy(TOKENIZER), TOKENIZER)
    request = GenerateRequest((25, 26, 27), 1, 4, 0.0, 1.0, seed=0, conversation_key=(0, 0))
    engine.generate([request])
    engine.load_weights(reference("s", 1, tmp_path / "other"))
    other = LocalEngine(load_policy(str(tmp_path / "other"))[0], TOKENIZER)
    for got, wanted in zip(engine.generate([request]), other.generate([request]), strict=True):
        assert got[0].token_ids == wanted[0].token_ids
        assert got[0].logprobs == pytest.approx(wanted[0].logprobs, abs=1e-6)


def test_a_diverged_policy_is_an_error_and_no_completion() -> None:
    model = tiny_policy(TOKENIZER)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    request = GenerateRequest((25, 26), 1, 4, 1.0, 1.0, seed=0)
    with pytest.raises(FloatingPointError, match="diverged"):
        LocalEngine(model, TOKENIZER).generate([request])


def test_a_diverged_policy_leaves_nothing_behind() -> None:
    """0 * NaN is NaN: what a masked column holds must not come from the diverged weights."""
    model = tiny_policy(TOKENIZER)
    engine = LocalEngine(model, TOKENIZER)
    good = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError):
        engine.generate(requests_200())
    model.load_state_dict(good)
    # One short and one long row: the short one's padding lies where the first call has written.
    ragged = [GenerateRequest((30,) * n, 1, 20, 1.0, 1.0, seed=n) for n in (2, 60)]
    assert engine.generate(ragged) == LocalEngine(MODEL, TOKENIZER).generate(ragged)


def test_an_empty_prompt_is_refused() -> None:
    engine = LocalEngine(MODEL, TOKENIZER)
    with pytest.raises(ValueError, match="request 0 has an empty prompt"):
        engine.generate([GenerateRequest((), 1, 4, 1.0, 1.0, seed=0)])
    with pytest.raises(ValueError, match="score request 0 has an empty prompt"):
        engine.score([ScoreRequest((), (1,))])
