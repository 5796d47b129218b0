"""The packed trainer makes the padded trainer's update, without padding and with prefixes once.

Layout of a pack (sequences a b c and d e, filled up to a multiple of 64):

    input_ids  a b c d e P P ...      positions  0 1 2 0 1 0 1 ...     starts  0 3 5 64
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moopd.config import TrainingConfig
from moopd.trainers import packed, packed_model
from moopd.trainers.checkpoints import TrainingState
from moopd.trainers.packed import FrozenScorer, PackedTrainer
from moopd.trainers.packed_model import make_packs, packed_hidden
from moopd.trainers.torch_trainer import TorchTrainer
from moopd.types import Owner, Role, ScoreRequest, TrainingSample
from tests.support import tiny_policy, word_tokenizer
from tests.trainers.test_torch_trainer import make_samples

TOKENIZER = word_tokenizer()
CONFIG = TrainingConfig(lr=1e-3, num_minibatches=2, tokens_per_microbatch=48)


def sample(number: int, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> TrainingSample:
    n = len(tokens)
    owner = Owner("q", number, 0, 0, Role.LEADER)
    return TrainingSample(owner, prompt, tokens, (-1.0,) * n, (0.5,) * n)


def gradient(trainer_class: type, config: TrainingConfig, dtype: torch.dtype) -> torch.Tensor:
    """The summed gradient of one minibatch, nothing stepped."""
    one = config.model_copy(update={"num_minibatches": 1, "lr": 0.0, "grad_clip": 1e9})
    trainer = trainer_class(tiny_policy(TOKENIZER).to(dtype), TOKENIZER, one)
    trainer.update(make_samples(), seed=1)
    if isinstance(trainer, PackedTrainer):
        parameters = trainer._masters._masters
    else:
        parameters = list(trainer.model.parameters())
    return torch.cat([p.grad.flatten().float() for p in parameters])


def test_a_pack_holds_sequences_end_to_end() -> None:
    [pack] = make_packs([sample(0, (21, 22), (23,)), sample(1, (24,), (25,))], 100, pad_id=1)
    assert pack.input_ids[:5].tolist() == [21, 22, 23, 24, 25]
    assert pack.input_ids[5:].tolist() == [1] * 59
    assert pack.positions[:7].tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert pack.starts_q.tolist() == pack.starts_k.tolist() == [0, 3, 5, 64]
    assert pack.path is None
    assert (pack.num_real, pack.max_q, pack.max_k) == (5, 256, 256)
    # Token 23 is predicted at position 1 of the axis, token 25 at position 3.
    assert pack.index.tolist() == [1, 3]
    assert pack.target.tolist() == [23, 25]


def test_a_shared_prefix_stands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_model, "_MIN_SHARED", 2)
    samples = [
        sample(0, (20, 21), (22, 23)),
        sample(1, (20, 21), (22, 24)),
        sample(2, (30,), (31,)),
    ]
    [pack] = make_packs(samples, 100, pad_id=0)
    # 20 21 22 23 | 24 | 30 31: the second sequence is 0 1 2 4 on the axis.
    assert pack.input_ids[:7].tolist() == [20, 21, 22, 23, 24, 30, 31]
    assert pack.positions[:7].tolist() == [0, 1, 2, 3, 3, 0, 1]
    assert pack.starts_q[:4].tolist() == [0, 4, 5, 7]
    assert pack.starts_k[:4].tolist() == [0, 4, 8, 10]
    assert pack.path is not None
    assert pack.path[:10].tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 5, 6]
    assert pack.index.tolist() == [1, 2, 1, 2, 5]


def test_a_full_pack_is_followed_by_another() -> None:
    others = [sample(k, (30 + k,), tuple(range(31, 31 + k))) for k in range(2, 8)]
    packs = list(make_packs(others, max_tokens=12, pad_id=0))
    # Rows of 3, 4, 5, 6, 7, 8 tokens, in this order.
    assert [pack.num_real for pack in packs] == [12, 6, 7, 8]
    assert sum(pack.target.numel() for pack in packs) == sum(range(2, 8))


def test_hidden_states_equal_those_of_each_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_policy(TOKENIZER)
    samples = [sample(0, (20, 21, 24), (22, 23)), sample(1, (20, 21, 26), (27, 28))]
    for least in (2, 32):
        monkeypatch.setattr(packed_model, "_MIN_SHARED", least)
        [pack] = make_packs(samples, 100, pad_id=0)
        with torch.no_grad():
            hidden = packed_hidden(model, pack)[pack.index]
            for number, one in enumerate(samples):
                ids = torch.tensor([[*one.prompt_ids, *one.token_ids]])
                alone = model.model(input_ids=ids).last_hidden_state[0, 2:4]
                ours = hidden[2 * number : 2 * number + 2]
                torch.testing.assert_close(ours, alone, rtol=0, atol=1e-5)
    assert model.config._attn_implementation != "moopd_packed"


@pytest.mark.parametrize(
    "changes", [{}, {"gradient_checkpointing": True}, {"merge_samples": False}]
)
def test_gradient_equals_the_padded_trainers(
    changes: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "HEAD_CHUNK", 5)
    monkeypatch.setattr(packed_model, "_MIN_SHARED", 2)
    config = CONFIG.model_copy(update=changes)
    ours = gradient(PackedTrainer, config, torch.float32)
    padded = gradient(TorchTrainer, CONFIG, torch.float32)
    torch.testing.assert_close(ours, padded, rtol=1e-5, atol=1e-7)


def test_metrics_and_weights_after_an_update_equal_the_padded_trainers() -> None:
    results = []
    for trainer_class in (PackedTrainer, TorchTrainer):
        trainer = trainer_class(tiny_policy(TOKENIZER), TOKENIZER, CONFIG)
        metrics = trainer.update(make_samples(), seed=1)
        weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        results.append((metrics, weights))
    (ours, our_weights), (padded, padded_weights) = results
    for name, value in padded.items():
        assert ours[name] == pytest.approx(value, abs=1e-5), name
    assert ((our_weights - padded_weights).abs() > 1e-5).float().mean() < 1e-3


def test_bfloat16_computes_and_float32_keeps_small_steps() -> None:
    """A step of 1e-5 is lost on bfloat16 weights of size 0.05 (spacing 2.4e-4), not on masters."""
    model = tiny_policy(TOKENIZER).to(torch.bfloat16)
    trainer = PackedTrainer(model, TOKENIZER, CONFIG.model_copy(update={"lr": 1e-5}))
    before = [m.detach().clone() for m in trainer._masters._masters]
    trainer.update(make_samples(), seed=1)
    masters = trainer._masters._masters
    moved = max((m - b).abs().max().item() for m, b in zip(masters, before, strict=True))
    assert 0.9e-5 < moved < 2.1e-5  # two Adam steps of at most 1e-5 each
    for parameter, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(parameter, master.to(torch.bfloat16))


def test_bfloat16_gradient_is_near_the_float32_one() -> None:
    exact = gradient(PackedTrainer, CONFIG, torch.float32)
    rounded = gradient(PackedTrainer, CONFIG, torch.bfloat16)
    assert (rounded - exact).norm() / exact.norm() < 2e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_run_makes_the_same_next_update(dtype: torch.dtype, tmp_path: Path) -> None:
    trainer = PackedTrainer(tiny_policy(TOKENIZER).to(dtype), TOKENIZER, CONFIG)
    trainer.update(make_samples(0), seed=1)
    trainer.save(tmp_path / "step_000001", TrainingState(step=1))
    trainer.update(make_samples(1), seed=2)
    again = PackedTrainer(tiny_policy(TOKENIZER, seed=9).to(dtype), TOKENIZER, CONFIG)
    assert again.restore(tmp_path / "step_000001").step == 1
    again.update(make_samples(1), seed=2)
    for ours, theirs in zip(trainer._masters._masters, again._masters._masters, strict=True):
        assert torch.equal(ours, theirs)


def test_scores_keep_order_and_equal_sequences_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_policy(TOKENIZER)
    requests = [
        ScoreRequest((20, 21), (22, 23)),
        ScoreRequest((24,), (25,)),
        ScoreRequest((20, 21), (22, 23)),
        ScoreRequest((20, 21, 22), (23,)),
    ]
    seen: list[int] = []
    inner = packed.packed_hidden

    def counting(model: object, pack: object, **options: object) -> torch.Tensor:
        seen.append(pack.num_real)  # type: ignore[attr-defined]
        return inner(model, pack, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(packed, "packed_hidden", counting)
    scores = FrozenScorer(model, TOKENIZER, 100).score(requests)
    assert seen == [4 + 2]
    assert scores[0] == scores[2]
    padded = TorchTrainer(model, TOKENIZER, CONFIG).score(requests)
    for ours, theirs in zip(scores, padded, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


class Sampler:
    """Counts what a sampling engine is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.names: list[str] = []

    def sleep(self) -> None:
        self.told.append("sleep")

    def update_weights(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self.told.append("weights")
        self.names = [name for name, _ in tensors]

    def end_conversations(self) -> None:
        self.told.append("end")


def test_the_sampler_rests_during_updates_and_gets_the_weights_once_tied() -> None:
    sampler = Sampler()
    trainer = PackedTrainer(tiny_policy(TOKENIZER), TOKENIZER, CONFIG, sampler)  # type: ignore[arg-type]
    trainer.update(make_samples(), seed=1)
    trainer.publish(sampler)  # type: ignore[arg-type]
    assert sampler.told == ["sleep", "weights", "end"]
    assert "model.embed_tokens.weight" in sampler.names
    assert "lm_head.weight" not in sampler.names


def test_no_gradient_takes_memory_while_the_sampler_works() -> None:
    sampler = Sampler()
    model = tiny_policy(TOKENIZER).to(torch.bfloat16)
    trainer = PackedTrainer(model, TOKENIZER, CONFIG, sampler)  # type: ignore[arg-type]
    trainer.update(make_samples(), seed=1)
    trainer.publish(sampler)  # type: ignore[arg-type]
    kept = [*trainer._masters._masters, *model.parameters()]
    assert kept and all(parameter.grad is None for parameter in kept)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_flash_attention_with_shared_prefixes_makes_the_same_gradient(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.setattr(packed_model, "_MIN_SHARED", 2)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    start = Qwen3ForCausalLM(config)
    one = CONFIG.model_copy(update={"num_minibatches": 1, "lr": 0.0, "grad_clip": 1e9})
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        options = {"compile_layers": compiled and device == "cuda"}
        model = Qwen3ForCausalLM(config)
        model.load_state_dict(start.state_dict())
        trainer = PackedTrainer(model.to(device, dtype), TOKENIZER, one.model_copy(update=options))
        trainer.update(make_samples(), seed=1)
        found.append(torch.cat([p.grad.flatten().cpu() for p in trainer._masters._masters]))  # type: ignore[union-attr]
    exact, ours = found
    assert (ours - exact).norm() / exact.norm() < 2e-2
