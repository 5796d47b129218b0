"""A smoke-size stage for verl: a tiny random policy, a few questions, a retriever behind HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moopd.config import ConfigError, Scale
from moopd.retrieval.base import Hit
from moopd.systems import System, load_systems
from moopd.trainers.checkpoints import reference, save_policy
from moopd.trainers.loop import TrainingTask
from moopd.trainers.verl_plugin.launch import PYTHON_VARIABLE, verl_python
from moopd.trainers.verl_plugin.serving import served
from moopd.types import CheckpointRef, Passage, Question
from tests.support import (
    REPORT,
    SEARCH,
    OnePassage,
    answer,
    play,
    tiny_policy,
    word_tokenizer,
)

SCALE = """
name: smoke
model: {prompt_style: compact}
workflow: {max_input_tokens: 96, max_output_tokens: 10, cascade_steps: 3, hierarchy_steps: 4,
  leader_rounds: 2, max_subtasks_per_round: 2}
retrieval: {top_k: 1}
training: {trainer: verl, questions_per_step: 3, group_size: 2, num_candidates: 2, lr: 1.0e-3,
  stage1_steps: 4, stage2_steps: 2, validate_every: 2, checkpoint_every: 1,
  validation_questions: 4, tokens_per_microbatch: 2048, kl_placement: after, beta: 0.1}
verl: {device: cpu, gpus: 1, attention: sdpa, agent_workers: 1, storage_units: 1,
  deadline_hours: 0.25, call_timeout_s: 120}
"""
Examples = list[tuple[tuple[int, ...], tuple[int, ...]]]
SYSTEMS = Path(__file__).parents[3] / "configs" / "systems.yaml"


def no_verl() -> str | None:
    """Why tests that need verl are skipped; never where its interpreter is named."""
    if PYTHON_VARIABLE in os.environ:
        return None
    try:
        verl_python()
    except ConfigError as error:
        return str(error)
    return None


class WordRetriever(OnePassage):
    num_passages = 1

    def search_scored(self, queries: Sequence[str], top_k: int) -> list[list[Hit]]:
        return [[Hit(self.passage, 1.0)] for _ in queries]


@contextmanager
def retrieval_server() -> Iterator[str]:
    with served(WordRetriever(), 1) as url:
        yield url


def smoke_scale(**training: object) -> Scale:
    tree = yaml.safe_load(SCALE)
    tree["training"].update(training)
    return Scale(**tree)


def save_tiny(folder: Path, system: str, seed: int) -> CheckpointRef:
    tokenizer = word_tokenizer()
    save_policy(tiny_policy(tokenizer, seed), tokenizer, folder)
    return reference(system, 0, folder)


def save_taught(folder: Path, system: str, seed: int, steps: int = 120) -> CheckpointRef:
    """A tiny policy that was shown how the roles act, so that workflows search and answer."""
    tokenizer = word_tokenizer()
    policy = tiny_policy(tokenizer, seed)
    teach(policy, examples(), steps)
    save_policy(policy, tokenizer, folder)
    return reference(system, 0, folder)


def examples() -> Examples:
    """(prompt, completion) of every call of a few scripted workflows."""
    search, write, say = SEARCH, REPORT, answer("x")
    task, select = "<task> who a </task>", "<select> 1 </select>"
    scripts = [
        ("cascade", [search, write, say]),
        ("cascade", [search, search, write, answer("y")]),
        ("hierarchy", [task, search, write, select, say]),
        ("hierarchy", [f"{task} {task}", search, search, write, write, select, answer("y")]),
    ]
    calls = [
        call
        for question in questions(6)
        for workflow, texts in scripts
        for call in play(workflow, texts, question=question).calls
    ]
    return [(call.prompt_ids, call.completions[0].token_ids) for call in calls]


def teach(policy: Any, shown: Examples, steps: int, lr: float = 1e-2) -> None:
    """Supervised steps on scripted calls, in place."""
    import torch

    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=lr)
    device = next(policy.parameters()).device
    width = max(len(prompt) + len(reply) for prompt, reply in shown)
    ids = torch.zeros(len(shown), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, (prompt, reply) in enumerate(shown):
        end = len(prompt) + len(reply)
        ids[row, :end] = torch.tensor([*prompt, *reply])
        labels[row, len(prompt) : end] = torch.tensor(reply)
    for _ in range(steps):
        chosen = torch.randint(len(shown), (24,))
        loss = policy(input_ids=ids[chosen].to(device), labels=labels[chosen].to(device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def questions(count: int) -> list[Question]:
    words = ("a", "b", "c", "d", "e")
    return [
        Question(f"q{n}", "nq", f"who {words[n % 5]} {words[n // 5 % 5]}", ("x",))
        for n in range(count)
    ]


@dataclass(frozen=True)
class Stage:
    scale: Scale
    task: TrainingTask


def stage(system: System, scale: Scale, num_steps: int) -> Stage:
    task = TrainingTask(
        system=system,
        seed=3,
        num_steps=num_steps,
        training=scale.training,
        workflow=scale.workflow,
        evaluation=scale.evaluation,
        train_questions=questions(20),
        dev_questions=questions(4),
        top_k=scale.retrieval.top_k,
    )
    return Stage(scale, task)


def system(name: str) -> System:
    return load_systems(SYSTEMS)[name]


PASSAGE = Passage("p1", "title", "red harbor")
