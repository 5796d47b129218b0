"""One training step of benchmarks.gpu in its parts, and the update against a padded one."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_parts import Clock, Sampler, show, wait
from moopd.config import TrainingConfig
from moopd.rl.batch import split_minibatches
from moopd.rl.samples import build_samples
from moopd.systems import OpdSignal, TrainRow
from moopd.trainers.loop import credit_config
from moopd.trainers.packed import FrozenScorer, PackedTrainer
from moopd.trainers.packed_model import Pack, logprobs_and_entropy, make_packs
from moopd.types import ScoreRequest, TrainingSample, Trajectory

PEAK_TFLOPS = {"H200": 989.5, "H100": 989.5, "A100": 312.0}
"""Dense bfloat16, from the vendor's data sheets."""


def step_figures(
    trainer: PackedTrainer,
    trajectories: Sequence[Trajectory],
    warm: Sequence[Trajectory],
    training: TrainingConfig,
    tokenizer: Any,
    clock: Clock,
    engine: Sampler,
    device: str,
    rollout_s: float | None,
) -> dict[str, float]:
    """One step of MultiAgent-OPD in its parts, then the update against padded ones.

    Without `rollout_s` nothing was sampled by an engine: rollout and sync have no figures.
    """
    engine.sleep()
    scorer = FrozenScorer(
        copy.deepcopy(trainer.model),
        tokenizer,
        2 * training.tokens_per_microbatch,
        device == "cuda",
    )
    teachers: dict[str, Any] = {"t": scorer}
    row = TrainRow(searcher=OpdSignal(kind="opd", teacher="t"), kl_teacher="t")
    times: dict[str, float] = {"teacher": 0.0, "old": 0.0}

    def timed(name: str, work: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(requests: Any) -> Any:
            start = time.perf_counter()
            found = work(requests)
            times[name] += time.perf_counter() - start
            return found

        return call

    scorer.score = timed("teacher", scorer.score)  # type: ignore[method-assign,assignment]

    def credit(of: Sequence[Trajectory]) -> Any:
        return build_samples(
            of, row, credit_config(training), teachers, rescore=timed("old", trainer.score)
        )

    with clock("compile"):
        trainer.update(credit(warm).samples, seed=0)
    times.update(teacher=0.0, old=0.0)
    _reset_peak()
    batch = credit(trajectories)
    with clock("update"):
        metrics = trainer.update(batch.samples, seed=1)
    whole = _whole_update(trainer, batch.samples, training, clock.seconds["update"], device)
    show(whole)
    parts = {
        "old_logprobs": times["old"],
        "teacher": times["teacher"],
        "update": clock.seconds["update"],
    }
    if rollout_s is not None:
        with clock("sync"):
            trainer.publish(engine)
        engine.sleep()
        parts |= {"rollout": rollout_s, "sync": clock.seconds["sync"]}
    total = sum(parts.values())
    shares = {f"step/{name}_share": value / total for name, value in parts.items()}
    results = {
        **{f"step/{name}_s": value for name, value in parts.items()},
        **(shares if rollout_s is not None else {}),
        "rollout_mismatch": batch.metrics["rollout_mismatch"],
        "update_packed_tokens": metrics["packed_tokens"],
        "update_trained_tokens": metrics["trained_tokens"],
        "update_peak_memory_gb": metrics.get("peak_memory_gb", 0.0),
        **whole,
    }
    show(results)
    if device == "cuda":
        some = [ScoreRequest(s.prompt_ids, s.token_ids) for s in batch.samples[:512]]
        show_profile("teacher scoring, 512 rows", partial(scorer.score, some))
    teachers.clear()
    del scorer
    gc.collect()
    return results | update_figures(trainer, batch.samples, training, tokenizer, clock, device)


def _whole_update(
    trainer: PackedTrainer,
    samples: Sequence[TrainingSample],
    training: TrainingConfig,
    seconds: float,
    device: str,
) -> dict[str, float]:
    """Flops of a whole update and, on a GPU whose peak is known, its share of that peak."""
    flops = sum(
        pack_flops(trainer.model.config, pack)
        for minibatch in split_minibatches(samples, training.num_minibatches, 1)
        for pack in make_packs(minibatch, training.tokens_per_microbatch, trainer._pad)
    )
    peak = _peak_tflops(device)
    return {
        "step/update_pflop": flops / 1e15,
        "step/update_tflops": flops / seconds / 1e12,
        **({"step/update_mfu_share": flops / seconds / 1e12 / peak} if peak else {}),
    }


def update_figures(
    trainer: PackedTrainer,
    samples: Sequence[TrainingSample],
    training: TrainingConfig,
    tokenizer: Any,
    clock: Clock,
    device: str,
) -> dict[str, float]:
    """Forward and backward of a tenth of the workflows: packed against padded."""
    owners = sorted({(s.owner.question_id, s.owner.group_index) for s in samples})
    kept = set(owners[:: max(1, len(owners) // 16)])
    part = [s for s in samples if (s.owner.question_id, s.owner.group_index) in kept]
    num_trained = sum(len(s.token_ids) for s in part)
    whole = sum(len(s.prompt_ids) + len(s.token_ids) for s in part)
    pad = int(tokenizer.pad_token_id)
    packs = [
        pack.to(trainer._device) for pack in make_packs(part, training.tokens_per_microbatch, pad)
    ]
    totals: dict[str, Any] = dict.fromkeys(
        ("loss", "clip_share", "approx_kl", "entropy", "tokens", "packed_tokens"), 0.0
    )
    trainer.model.train()
    with clock("packed"):
        for pack in packs:
            trainer._accumulate(pack, num_trained, totals)
    seconds = clock.seconds["packed"]
    tflops = sum(pack_flops(trainer.model.config, pack) for pack in packs) / seconds / 1e12
    peak = _peak_tflops(device)
    figures = {
        "sample_tokens": whole,
        "packed_tokens": sum(pack.num_real for pack in packs),
        "update_sample_tokens_per_s": whole / seconds,
        "update_packed_tokens_per_s": sum(pack.num_real for pack in packs) / seconds,
        "update_tflops": tflops,
        **({"update_mfu_share": tflops / peak} if peak else {}),
    }
    show(figures)
    if device == "cuda":
        pack = packs[len(packs) // 2]
        show_profile("update of a pack", lambda: trainer._accumulate(pack, num_trained, totals))
        # The padded rows' logits need the room, and no optimizer step follows.
        trainer._masters.optimizer.state.clear()
        torch.cuda.empty_cache()
    with clock("padded"):
        padded_update(trainer.model, part, training, pad, trainer._device)
    trainer._masters.zero_grad()
    trainer.model.eval()
    return figures | {"packed_to_padded_ratio": clock.seconds["padded"] / seconds}


def padded_update(
    model: Any, samples: Sequence[TrainingSample], training: TrainingConfig, pad: int, device: Any
) -> None:
    """What is compared with: each completion its own row, padded to the longest of its batch, a
    mask, gradient checkpointing, logits of every position; rows in the order they were sampled."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch: list[TrainingSample] = []
    for sample in [*samples, None]:
        rows = [*batch, sample] if sample else batch
        width = max(len(s.prompt_ids) + len(s.token_ids) for s in rows)
        if batch and (sample is None or width * len(rows) > training.tokens_per_microbatch):
            _padded_batch(model, batch, pad, device)
            batch = []
        if sample:
            batch.append(sample)
    model.gradient_checkpointing_disable()


def _padded_batch(model: Any, rows: Sequence[TrainingSample], pad: int, device: Any) -> None:
    width = max(len(s.prompt_ids) + len(s.token_ids) for s in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    trained = torch.zeros((len(rows), width - 1), dtype=torch.bool)
    for number, sample in enumerate(rows):
        start, length = len(sample.prompt_ids), len(sample.prompt_ids) + len(sample.token_ids)
        ids[number, :length] = torch.tensor((*sample.prompt_ids, *sample.token_ids))
        mask[number, :length] = 1
        trained[number, start - 1 : length - 1] = True
    ids, mask, trained = ids.to(device), mask.to(device), trained.to(device)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logprobs, entropy = logprobs_and_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    keep = trained.flatten()
    torch.autograd.backward(-(logprobs[keep].mean() + 1e-3 * entropy[keep].mean()))


def pack_flops(config: Any, pack: Pack) -> float:
    """Forward and backward: 6 x weights x tokens, head at trained tokens, causal attention."""
    heads = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    weights = (
        config.num_hidden_layers
        * config.hidden_size
        * (2 * heads + 2 * keys + 3 * config.intermediate_size)
    )
    q = (pack.starts_q[1:] - pack.starts_q[:-1]).double()
    k = (pack.starts_k[1:] - pack.starts_k[:-1]).double()
    pairs = float((q * (k - q) + q * (q + 1) / 2).sum())
    attention = 12 * config.num_hidden_layers * heads * pairs
    head = 6 * config.hidden_size * config.vocab_size * pack.target.numel()
    return float(6 * weights * pack.num_real + attention + head)


def show_profile(name: str, work: Callable[[], object]) -> None:
    """Where the GPU's time goes in `work`."""
    wait()
    start = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        wait()
    print(f"profile of {name}: {time.perf_counter() - start:.3f} s on the wall, profiler included")
    averages = profile.key_averages()
    print(averages.table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_tflops(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)
