"""verl's agent loop for a workflow: one output per completion, failures as outputs.

Runs inside verl's agent-loop workers. Nothing here decides credit: rewards of the workflow are
attached to its rows and read by the trainer.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from traceback import format_exception
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)

from moopd.retrieval.base import Retriever
from moopd.retrieval.client import RemoteRetriever
from moopd.rl.critic import HttpJudge, Judge, judge_trajectories
from moopd.rl.samples import needs_judge
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.trainers.verl_plugin.drive import Driven, drive
from moopd.trainers.verl_plugin.rows import VerlRow, broken_row, rows_of
from moopd.trainers.verl_plugin.spec import AGENT_NAME, VerlRun, load_run
from moopd.types import Completion, GenerateRequest, Judgement, Question
from moopd.workflows.rollout import Job, Team, derive_seed

_TRAIN, _VALIDATION = 0, 1
"""Branches of the seed tree, as in the training loop of the torch trainer."""


@dataclass(frozen=True)
class _Shared:
    """What all workflows of one process use."""

    run: VerlRun
    retriever: Retriever
    judge: Judge | None
    prompts: Prompts


@lru_cache(maxsize=1)
def _shared(run_file: str) -> _Shared:
    run = load_run(run_file)
    prompts = Prompts(run.prompt_style, run.workflow.max_passage_words)
    judge = HttpJudge(run.critic, prompts) if needs_judge(run.row) else None
    run.leave_proof("agent_loop", {"pid": os.getpid(), "module": __file__})
    return _Shared(run, RemoteRetriever(run.retrieval_url), judge, prompts)


@lru_cache(maxsize=1)
def _renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


@dataclass
class _Versions:
    """Weight versions that sampled a workflow; verl tags every row with them."""

    lowest: int
    highest: int

    def see(self, fields: dict[str, Any]) -> None:
        low, high = fields.get("min_global_steps"), fields.get("max_global_steps")
        if low is not None and high is not None:
            self.lowest, self.highest = min(self.lowest, low), max(self.highest, high)


@register(AGENT_NAME)
class WorkflowLoop(AgentLoopBase):  # type: ignore[misc]
    """One workflow of one question (one session of one prompt, in verl's words)."""

    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **_: Any) -> None:
        # Not the base class's: it builds prompts of its own and refuses tokenizers of families
        # that it does not know. Ours come from the renderer.
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        step, member = int(row["global_steps"]), int(row["session_id"])
        versions = _Versions(step - 1, step - 1)
        try:
            rows, error = await self._rows(sampling_params, row, step, member, versions)
        except Exception as failure:
            # Also a fault of ours must reach the trainer as data, or the group lacks a workflow.
            error = "".join(format_exception(failure))
            rows = [broken_row(row["uid"], member, int(self.tokenizer.eos_token_id), error)]
        return [_output(one, versions, error) for one in rows]

    async def _rows(
        self,
        sampling_params: dict[str, Any],
        row: dict[str, Any],
        step: int,
        member: int,
        versions: _Versions,
    ) -> tuple[list[VerlRow], str | None]:
        shared = _shared(str(self.config.actor_rollout_ref.moopd.run_file))
        info = row["extra_info"]
        training = info["split"] == "train"
        # verl's uid names the group: a question met twice in a batch forms two groups.
        question = replace(_question(info["question"]), id=row["uid"])
        seed = _seed(shared.run.seed, training, step, int(info["number"]), member)
        driven = await drive(
            Job(question, member, seed),
            self._team(shared, training),
            _ServerCalls(self, shared.run, sampling_params, versions),
            shared.retriever,
        )
        judgements: dict[int, Judgement | None] | None = _no_judgements(driven)
        if training:
            driven, judgements = await _judged(shared, driven)
        filler = int(self.tokenizer.eos_token_id)
        signal = shared.run.row.searcher
        rows = rows_of(driven.trajectory, signal, filler, judgements, driven.error)
        return rows, driven.error

    def _team(self, shared: _Shared, training: bool) -> Team:
        run = shared.run
        return Team(
            workflow=run.system.workflow,
            config=run.workflow,
            prompts=shared.prompts,
            renderer=_renderer(self.tokenizer),
            sampling=run.training.sampling if training else run.evaluation_sampling,
            num_candidates=run.training.num_candidates if training else 1,
            top_k=run.top_k,
        )


class _ServerCalls:
    """`Generate` through verl's server client; one request id keeps a workflow on one server."""

    def __init__(
        self,
        loop: WorkflowLoop,
        run: VerlRun,
        sampling_params: dict[str, Any],
        versions: _Versions,
    ) -> None:
        self._loop = loop
        self._run = run
        self._sampling = sampling_params
        self._versions = versions
        self._request_id = uuid4().hex
        # SGLang refuses unknown sampling keys; only the transformers replica takes a seed.
        self._seeded = loop.rollout_config.name == "transformers_cpu"

    async def __call__(self, request: GenerateRequest, candidate: int) -> Completion:
        output = await asyncio.wait_for(
            self._loop.server_manager.generate(
                request_id=self._request_id,
                prompt_ids=list(request.prompt_ids),
                sampling_params=self._params(request, candidate),
            ),
            self._run.call_timeout_s,
        )
        if output.stop_reason in ("aborted", "abort"):
            raise RuntimeError("the rollout server aborted the request")
        self._versions.see(output.extra_fields)
        tokens = tuple(int(token) for token in output.token_ids)
        tokenizer = self._loop.tokenizer
        cut = len(tokens) >= request.max_tokens and tokens[-1] != tokenizer.eos_token_id
        return Completion(
            token_ids=tokens,
            logprobs=tuple(float(value) for value in output.log_probs or ()),
            text=_renderer(tokenizer).decode(tokens),
            finish="length" if cut else "stop",
        )

    def _params(self, request: GenerateRequest, candidate: int) -> dict[str, Any]:
        params = {
            **self._sampling,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_tokens": request.max_tokens,
            "logprobs": True,
        }
        return params | {"seed": derive_seed(request.seed, candidate)} if self._seeded else params


async def _judged(
    shared: _Shared, driven: Driven
) -> tuple[Driven, dict[int, Judgement | None] | None]:
    if shared.judge is None or driven.error is not None:
        return driven, None
    try:
        (verdicts,) = await asyncio.to_thread(judge_trajectories, shared.judge, [driven.trajectory])
    except Exception as error:
        return replace(driven, error=f"judge: {type(error).__name__}: {error}"), None
    return driven, verdicts


def _seed(seed: int, training: bool, step: int, number: int, member: int) -> int:
    if training:
        return derive_seed(seed, _TRAIN, step, number, member)
    return derive_seed(seed, _VALIDATION, number)


def _no_judgements(driven: Driven) -> dict[int, Judgement | None]:
    """Development workflows are not judged: every report counts as without a verdict."""
    return dict.fromkeys((report.subtask for report in driven.trajectory.reports), None)


def _question(text: str) -> Question:
    values = json.loads(text)
    return Question(
        **{
            **values,
            "answers": tuple(values["answers"]),
            "support_ids": tuple(values["support_ids"]),
        }
    )


def _output(row: VerlRow, versions: _Versions, error: str | None) -> AgentLoopOutput:
    return AgentLoopOutput(
        prompt_ids=list(row.prompt_ids),
        response_ids=list(row.token_ids),
        response_mask=[int(row.trained)] * len(row.token_ids),
        response_logprobs=list(row.logprobs),
        reward_score=row.outcome,
        num_turns=1,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "min_global_steps": versions.lowest,
            "max_global_steps": versions.highest,
            "reward_extra_info": {**row.measures, "error": error or ""},
            "moopd": {**row.meta, "measures": row.measures},
        },
    )
