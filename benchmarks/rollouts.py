"""Rollout throughput: all live workflows at once, one at a time, and unbatched `generate` calls.

    python benchmarks/rollouts.py [--questions 24]

Prints CPU seconds and ratios of one run on one thread; the policy is untrained, so workflows differ
in length, and all three ways produce the same number of completions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from moopd.config import ModelConfig, SamplingConfig, WorkflowConfig, WorldConfig
from moopd.data.world import build_world
from moopd.engines.local import LocalEngine
from moopd.engines.tiny_model import build_tiny
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.types import Passage, Trajectory
from moopd.workflows.rollout import Job, Team, derive_seed, run_workflows


class Fixed:
    """Retrieval that costs nothing: the policy is what is measured."""

    def __init__(self, passages: list[Passage]) -> None:
        self._passages = passages

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        return [self._passages[:top_k] for _ in queries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(1)
    world = build_world(WorldConfig())
    model, tokenizer = build_tiny(ModelConfig(), 0)
    limits = WorkflowConfig(max_input_tokens=640, max_output_tokens=16)
    team = Team(
        "hierarchy", limits, Prompts("compact"), Renderer(tokenizer), SamplingConfig(), 5, 3
    )
    jobs = [
        Job(question, member, derive_seed(0, number, member))
        for number, question in enumerate(world.questions["dev"][: options.questions])
        for member in range(5)
    ]
    retriever = Fixed(list(world.passages))
    engine = LocalEngine(model, tokenizer)
    run_workflows(jobs[:5], team, engine, retriever)
    batched, done = timed(lambda: run_workflows(jobs, team, engine, retriever))
    single, _ = timed(lambda: [run_workflows([j], team, engine, retriever)[0] for j in jobs])
    plain, _ = timed(lambda: generate_calls(model, tokenizer, done, limits.max_output_tokens))
    calls = sum(len(t.calls) for t in done)
    print(f"{len(jobs)} hierarchy workflows, {calls} calls, CPU seconds on one thread")
    print(f"all at once      {batched:8.2f}   {1000 * batched / len(jobs):7.1f} ms a workflow")
    print(f"one at a time    {single:8.2f}   {single / batched:7.1f} times the batched seconds")
    print(f"plain generate   {plain:8.2f}   {plain / batched:7.1f} times the batched seconds")


def timed(work: Callable[[], list[Trajectory]]) -> tuple[float, list[Trajectory]]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def generate_calls(
    model: object, tokenizer: object, done: list[Trajectory], max_tokens: int
) -> list[Trajectory]:
    """The same prompts and lengths through transformers' generate, a request at a time."""
    for trajectory in done:
        for call in trajectory.calls:
            ids = torch.tensor([call.prompt_ids])
            for completion in call.completions:
                wanted = len(completion.token_ids)
                model.generate(  # type: ignore[attr-defined]
                    ids, attention_mask=torch.ones_like(ids), do_sample=True,
                    min_new_tokens=wanted, max_new_tokens=min(wanted, max_tokens),
                    pad_token_id=tokenizer.pad_token_id,  # type: ignore[attr-defined]
                )  # fmt: skip
    return done


if __name__ == "__main__":
    main()
