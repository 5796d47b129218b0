"""Speed on one GPU: one run prints the ratios that docs/performance.md quotes.

    python -m benchmarks.gpu --data FOLDER --tokenizer FOLDER --out FILE [--shape qwen3-4b]

Weights are random; the tokens of a workflow are sampled, its words come from a script, so that
every workflow is a full one. `--url` measures a running server in place of an engine in process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import (
    PEAK_TFLOPS,
    SHAPES,
    ScriptedWords,
    pack_flops,
    padded_update,
    random_config,
    random_model,
    read_data,
    scripted_team,
)
from moopd.config import EngineConfig, TrainingConfig
from moopd.engines.sglang import SGLangEngine, _body, start_sglang
from moopd.rl.samples import build_samples
from moopd.systems import OpdSignal, TrainRow
from moopd.trainers.loop import credit_config
from moopd.trainers.packed import FrozenScorer, PackedTrainer
from moopd.trainers.packed_model import Pack, make_packs
from moopd.types import (
    GenerateRequest,
    TrainingSample,
    Trajectory,
)
from moopd.workflows.rollout import Job, run_workflows


@dataclass
class Clock:
    """Named seconds, device work included."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        _wait()
        start = time.perf_counter()
        yield
        _wait()
        self.seconds[name] = time.perf_counter() - start
        print(f"[{name}] {self.seconds[name]:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="questions.*, corpus.* (jsonl.gz)")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--live", type=int, nargs="+", default=[160, 480],
                        help="workflows at a time; the first is the training step's")  # fmt: skip
    parser.add_argument("--pack", type=int, default=8192, help="tokens a microbatch")
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--url", help="a running SGLang server")
    parser.add_argument("--option", action="append", default=[], help="engine option, a=b")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = run(arguments)
    arguments.out.write_text(json.dumps(results, indent=1))
    print(json.dumps(results, indent=1))


def run(arguments: argparse.Namespace) -> dict[str, float]:
    """Every measurement on one model; figures that are ratios end in `_ratio` or `_share`."""
    from transformers import AutoTokenizer

    clock = Clock()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        with clock("engine start"):
            config = random_config(arguments.shape, Path(folder))
            engine = start_engine(arguments, folder, tokenizer)
        with clock("model start"):
            model = random_model(config, device)
            training = training_config(arguments, device)
            trainer = PackedTrainer(model, tokenizer, training, engine)
        results = measure(arguments, clock, engine, trainer, training, tokenizer, device)
    engine.close()
    return results | {f"seconds/{name}": value for name, value in clock.seconds.items()}


def measure(
    arguments: argparse.Namespace,
    clock: Clock,
    engine: SGLangEngine,
    trainer: PackedTrainer,
    training: TrainingConfig,
    tokenizer: Any,
    device: str,
) -> dict[str, float]:
    with clock("first sync"):
        trainer.publish(engine)
    questions, retriever = read_data(arguments.data, max(arguments.live) // 5)
    scripted, team = scripted_team(engine, tokenizer, training, retriever)
    jobs = [Job(q, g, 1000 * n + g) for n, q in enumerate(questions) for g in range(5)]
    with clock("warm-up rollout"):
        warm = run_workflows(jobs[-40:], team, scripted, retriever)
    results: dict[str, float] = {}
    rolled: list[list[Trajectory]] = []
    for num_live in arguments.live:
        name, chosen = f"{num_live} live", jobs[:num_live]
        trainer.publish(engine)  # flushes the prefix cache
        scripted.seen.clear()
        with clock(f"rollout {name}"):
            done = run_workflows(chosen, team, scripted, retriever, max_live=len(chosen))
        results |= rollout_figures(name, done, clock, engine, trainer, scripted)
        rolled.append(done)
    trainer.publish(engine)
    results |= generate_figures(trainer.model, engine, scripted.seen, tokenizer, clock, device)
    show(results)
    return results | step_figures(
        trainer,
        rolled[0],
        warm,
        training,
        tokenizer,
        clock,
        engine,
        device,
        clock.seconds[f"rollout {arguments.live[0]} live"],
    )


def rollout_figures(
    name: str,
    trajectories: Sequence[Trajectory],
    clock: Clock,
    engine: SGLangEngine,
    trainer: PackedTrainer,
    scripted: ScriptedWords,
) -> dict[str, float]:
    """Workflows against the same prompts and lengths sent all at once."""
    trainer.publish(engine)  # flushes the prefix cache
    requests = list(scripted.seen)
    with clock(f"raw {name}"):
        engine.run(_raw(engine, requests))
    tokens = sum(r.max_tokens * r.num_candidates for r in requests)
    prompt = sum(len(r.prompt_ids) for r in requests)
    workflow = tokens / clock.seconds[f"rollout {name}"]
    raw = tokens / clock.seconds[f"raw {name}"]
    figures = {
        "workflows": len(trajectories),
        "calls": len(requests),
        "sampled_tokens": tokens,
        "prompt_tokens": prompt,
        "rollout_tokens_per_s": workflow,
        "raw_tokens_per_s": raw,
        "rollout_to_raw_ratio": workflow / raw,
    }
    return {f"{name}/{figure}": value for figure, value in figures.items()}


async def _raw(engine: SGLangEngine, requests: Sequence[GenerateRequest]) -> None:
    transport = engine._transport
    bodies = [
        _body(list(request.prompt_ids), request, candidate, None)
        for request in requests
        for candidate in range(request.num_candidates)
    ]
    await asyncio.gather(*(transport.generate(body) for body in bodies))


def generate_figures(
    model: Any,
    engine: SGLangEngine,
    seen: Sequence[GenerateRequest],
    tokenizer: Any,
    clock: Clock,
    device: str,
    num_prompts: int = 64,
    num_tokens: int = 64,
) -> dict[str, float]:
    """SGLang against transformers' generate on the same prompts (left-padded there)."""
    requests = [
        replace(r, num_candidates=1, max_tokens=num_tokens, temperature=1.0)
        for r in seen[-num_prompts:]
    ]
    with clock("sglang generate"):
        engine.generate(requests)
    width = max(len(r.prompt_ids) for r in requests)
    pad = int(tokenizer.pad_token_id)
    rows = [[pad] * (width - len(r.prompt_ids)) + list(r.prompt_ids) for r in requests]
    mask = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in requests]
    engine.sleep()
    with clock("transformers generate"), torch.no_grad():
        model.generate(
            torch.tensor(rows, device=device),
            attention_mask=torch.tensor(mask, device=device),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=True,
            pad_token_id=pad,
        )
    return {
        "sglang_to_transformers_ratio": clock.seconds["transformers generate"]
        / clock.seconds["sglang generate"]
    }


def step_figures(
    trainer: PackedTrainer,
    trajectories: Sequence[Trajectory],
    warm: Sequence[Trajectory],
    training: TrainingConfig,
    tokenizer: Any,
    clock: Clock,
    engine: SGLangEngine,
    device: str,
    rollout_s: float,
) -> dict[str, float]:
    """One step of MultiAgent-OPD in its parts, then the update against padded ones."""
    import copy

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
    with clock("sync"):
        trainer.publish(engine)
    engine.sleep()
    parts = {
        "rollout": rollout_s,
        "old_logprobs": times["old"],
        "teacher": times["teacher"],
        "update": clock.seconds["update"],
        "sync": clock.seconds["sync"],
    }
    total = sum(parts.values())
    results = {
        **{f"step/{name}_s": value for name, value in parts.items()},
        **{f"step/{name}_share": value / total for name, value in parts.items()},
        "rollout_mismatch": batch.metrics["rollout_mismatch"],
        "update_packed_tokens": metrics["packed_tokens"],
        "update_trained_tokens": metrics["trained_tokens"],
        "update_peak_memory_gb": metrics.get("peak_memory_gb", 0.0),
    }
    show(results)
    teachers.clear()
    del scorer
    return results | update_figures(trainer, batch.samples, training, tokenizer, clock, device)


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
    packs = list(make_packs(part, training.tokens_per_microbatch, pad))
    totals: dict[str, Any] = dict.fromkeys(
        ("loss", "clip_share", "approx_kl", "entropy", "tokens", "packed_tokens"), 0.0
    )
    trainer.model.train()
    with clock("packed"):
        for pack in packs:
            trainer._accumulate(pack.to(trainer._device), num_trained, totals)
    flops = sum(pack_flops(trainer.model.config, pack) for pack in packs)
    seconds = clock.seconds["packed"]
    peak = _peak_tflops(device)
    figures = {
        "sample_tokens": whole,
        "packed_tokens": sum(pack.num_real for pack in packs),
        "update_sample_tokens_per_s": whole / seconds,
        "update_packed_tokens_per_s": sum(pack.num_real for pack in packs) / seconds,
        "update_tflops": flops / seconds / 1e12,
        **({"update_mfu_share": flops / seconds / 1e12 / peak} if peak else {}),
    }
    show(figures)
    if device == "cuda":
        show_profile(trainer, packs[len(packs) // 2], num_trained, totals)
        torch.cuda.empty_cache()
    with clock("padded"):
        padded_update(trainer.model, part, training, pad, trainer._device)
    trainer._masters.zero_grad()
    trainer.model.eval()
    return figures | {"packed_to_padded_ratio": clock.seconds["padded"] / seconds}


def training_config(arguments: argparse.Namespace, device: str) -> TrainingConfig:
    return TrainingConfig(
        trainer="packed",
        tokens_per_microbatch=arguments.pack,
        compile_layers=device == "cuda" and not arguments.eager,
        kl_placement="after",
    )


def start_engine(arguments: argparse.Namespace, folder: str, tokenizer: Any) -> SGLangEngine:
    options: dict[str, Any] = {}
    if not arguments.url:
        options = {
            "load_format": "dummy",
            "deterministic": False,
            "share_memory": True,
            "mem_fraction_static": 0.5,
            "context_length": 9216,
            "cuda_graph_bs": [1, 8, 16, 32, 64, 96, *range(128, 513, 32)],
            "disable_piecewise_cuda_graph": True,
        }
    for option in arguments.option:
        name, _, value = option.partition("=")
        options[name] = json.loads(value)
    config = EngineConfig(kind="sglang", url=arguments.url, options=options)
    return start_sglang(config, folder, tokenizer.decode, None)


def show(figures: dict[str, float]) -> None:
    """What is known so far, should a later part fail."""
    for name, value in figures.items():
        print(f"  {name} = {value:.4g}", flush=True)


def show_profile(
    trainer: PackedTrainer, pack: Pack, num_trained: int, totals: dict[str, Any]
) -> None:
    """Where the GPU's time goes in one pack."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        trainer._accumulate(pack.to(trainer._device), num_trained, totals)
        _wait()
    averages = profile.key_averages()
    print(averages.table(sort_by="cuda_time_total", row_limit=18, max_name_column_width=60))


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak_tflops(device: str) -> float | None:
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((peak for key, peak in PEAK_TFLOPS.items() if key in name), None)


if __name__ == "__main__":
    main()
