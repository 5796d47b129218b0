"""Rollout throughput: all live workflows at once, one at a time, and unbatched `generate` calls.

    python benchmarks/rollouts.py [--questions 24] [--policy FOLDER]

Prints CPU seconds and ratios of one run on one thread. The policy is the warm-started base that
`make run` left behind: an untrained one malforms its first turn, so that nobody would search and
no conversation would have a second turn. All three ways make the same calls at the same lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from moopd.config import Scale, load_scale
from moopd.data.world import build_world
from moopd.engines.local import LocalEngine
from moopd.engines.models import load_policy
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.types import Passage, Trajectory
from moopd.workflows.rollout import Job, Team, derive_seed, run_workflows

ROOT = Path(__file__).resolve().parents[1]


class Fixed:
    """Retrieval that costs nothing: the policy is what is measured."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._passages = list(passages)

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [self._passages[:top_k] for _ in queries]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--policy", help="a transformers folder (default: the base of make run)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    scale = load_scale(ROOT / "configs" / "scale" / "tiny.yaml")
    model, tokenizer = load_policy(options.policy or str(newest_base(scale)))
    world = build_world(scale.data.world)
    team = Team(
        "hierarchy", scale.workflow, Prompts("compact"), Renderer(tokenizer),
        scale.training.sampling, scale.training.num_candidates, scale.retrieval.top_k,
    )  # fmt: skip
    jobs = [
        Job(question, member, derive_seed(0, number, member))
        for number, question in enumerate(world.questions["dev"][: options.questions])
        for member in range(scale.training.group_size)
    ]
    retriever = Fixed(world.passages)
    engine = LocalEngine(model, tokenizer)
    run_workflows(jobs[:5], team, engine, retriever)
    batched, done = timed(lambda: run_workflows(jobs, team, engine, retriever))
    single, alone = timed(lambda: [run_workflows([j], team, engine, retriever)[0] for j in jobs])
    plain, _ = timed(lambda: generate_calls(model, tokenizer, done, together=True))
    apart, _ = timed(lambda: generate_calls(model, tokenizer, done, together=False))
    describe(done, alone)
    print(f"all at once      {batched:8.2f}   {1000 * batched / len(jobs):7.1f} ms a workflow")
    print(f"one at a time    {single:8.2f}   {single / batched:7.1f} times the batched seconds")
    print("plain generate")
    print(f"  a request      {plain:8.2f}   {plain / batched:7.1f} times the batched seconds")
    print(f"  a completion   {apart:8.2f}   {apart / batched:7.1f} times the batched seconds")


def newest_base(scale: Scale) -> Path:
    """The base that this scale's warm start made last."""
    home = Path(os.environ.get("MOOPD_HOME") or ROOT / "data" / "home")
    wanted = scale.warm_start.model_dump(mode="json")
    records = sorted(home.glob("artifacts/base/*/artifact.json"), key=lambda p: p.stat().st_mtime)
    for record in reversed(records):
        if json.loads(record.read_text())["facets"]["config"].get("warm_start") == wanted:
            return record.parent / "policy"
    sys.exit(
        f"no base of scale {scale.name} under {home}: run `make run` first, or give --policy FOLDER"
    )


def describe(done: Sequence[Trajectory], alone: Sequence[Trajectory]) -> None:
    """What was measured, and that it was the same both ways."""
    calls = [call for trajectory in done for call in trajectory.calls]
    conversations = sum(len({c.conversation for c in t.calls}) for t in done)
    roles = ", ".join(f"{n} {role.value}" for role, n in Counter(c.role for c in calls).items())
    same = sum(sampled(a) == sampled(b) for a, b in zip(done, alone, strict=True))
    print(f"{len(done)} hierarchy workflows, {len(calls)} calls ({roles}),")
    print(f"{len(calls) - conversations} of them go on with a conversation;")
    print(f"{same} of {len(done)} workflows have the same tokens alone as in the batch")
    if len(calls) == conversations:
        print("No conversation has a second turn: this policy measures nothing of interest.")
    print("CPU seconds on one thread:")


def sampled(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [c.token_ids for call in trajectory.calls for c in call.completions]


def timed(work: Callable[[], list[Trajectory]]) -> tuple[float, list[Trajectory]]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def generate_calls(
    model: Any, tokenizer: Any, done: list[Trajectory], *, together: bool
) -> list[Trajectory]:
    """The same prompts and lengths through transformers' generate, a request at a time.

    `together`: the candidates of a request in one call, as long as its longest; else one by one.

    The end token is an id that does not exist, and there is no top-k: what is not asked for must
    not cost the other side time.
    """
    for trajectory in done:
        for call in trajectory.calls:
            ids = torch.tensor([call.prompt_ids])
            mask = torch.ones_like(ids)
            lengths = [len(completion.token_ids) for completion in call.completions]
            for length in [max(lengths)] if together else lengths:
                model.generate(
                    ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=length,
                    num_return_sequences=len(lengths) if together else 1,
                    eos_token_id=model.config.vocab_size, pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
    return done


if __name__ == "__main__":
    main()
