"""Speed on one GPU: one run prints the ratios that docs/performance.md quotes.

    python -m benchmarks.gpu --data FOLDER --tokenizer FOLDER --out FILE [--shape qwen3-4b]

Weights are random; the tokens of a workflow are sampled, its words come from a script, so that
every workflow is a full one. `--url` measures a running server in place of an engine in process;
`--update-only` needs no SGLang.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_parts import (
    SHAPES,
    Clock,
    RandomTokens,
    Sampler,
    ScriptedWords,
    random_config,
    random_model,
    read_data,
    scripted_team,
    show,
)
from benchmarks.gpu_update import step_figures
from moopd.config import EngineConfig, TrainingConfig
from moopd.engines.sglang import SGLangEngine, _body, start_sglang
from moopd.trainers.packed import PackedTrainer
from moopd.types import GenerateRequest, Trajectory
from moopd.workflows.rollout import Job, run_workflows


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
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--rollouts-only", action="store_true", help="no training step")
    part.add_argument("--update-only", action="store_true",
                      help="no SGLang: the training step on tokens drawn at random")  # fmt: skip
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
            engine: Sampler = (
                RandomTokens(len(tokenizer))
                if arguments.update_only
                else start_engine(arguments, folder, tokenizer)
            )
        with clock("model start"):
            model = random_model(config, device)
            training = training_config(arguments, device)
            sampler = engine if isinstance(engine, SGLangEngine) else None
            trainer = PackedTrainer(model, tokenizer, training, sampler)
        results = measure(arguments, clock, engine, trainer, training, tokenizer, device)
    engine.close()
    return results | {f"seconds/{name}": value for name, value in clock.seconds.items()}


def measure(
    arguments: argparse.Namespace,
    clock: Clock,
    engine: Sampler,
    trainer: PackedTrainer,
    training: TrainingConfig,
    tokenizer: Any,
    device: str,
) -> dict[str, float]:
    questions, retriever = read_data(arguments.data, max(arguments.live) // 5)
    scripted, team = scripted_team(engine, tokenizer, training, retriever)
    jobs = [Job(q, g, 1000 * n + g) for n, q in enumerate(questions) for g in range(5)]
    first = arguments.live[0]
    step = partial(
        step_figures, trainer, training=training, tokenizer=tokenizer, clock=clock, engine=engine,
        device=device,
    )  # fmt: skip
    if not isinstance(engine, SGLangEngine):
        warm, done = (
            run_workflows(some, team, scripted, retriever) for some in (jobs[-40:], jobs[:first])
        )
        return step(trajectories=done, warm=warm, rollout_s=None)
    with clock("first sync"):
        trainer.publish(engine)
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
        figures = rollout_figures(name, done, clock, engine, trainer, scripted)
        show(figures)
        results |= figures
        rolled.append(done)
    if arguments.rollouts_only:
        return results
    trainer.publish(engine)
    generated = generate_figures(trainer.model, engine, scripted.seen, tokenizer, clock, device)
    show(generated)
    rollout_s = clock.seconds[f"rollout {first} live"]
    return results | generated | step(trajectories=rolled[0], warm=warm, rollout_s=rollout_s)


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
            "mem_fraction_static": 0.38,  # beside 60 GiB of trainer and teacher
            "context_length": 9216,
            "cuda_graph_bs": [1, 8, 16, 32, 64, 96, *range(128, 513, 32)],
            "disable_piecewise_cuda_graph": True,
            # Turns end one by one: prefilling each alone stops decoding every time.
            "enable_prefill_delayer": True,
            "prefill_delayer_queue_min_ratio": 0.06,
            "prefill_delayer_max_delay_ms": 100.0,
        }
    for option in arguments.option:
        name, _, value = option.partition("=")
        options[name] = json.loads(value)
    config = EngineConfig(kind="sglang", url=arguments.url, options=options)
    return start_sglang(config, folder, tokenizer.decode, None)


if __name__ == "__main__":
    main()
