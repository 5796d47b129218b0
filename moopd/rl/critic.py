"""Who judges reports in the Prompted Critic row: a frozen policy, or a model behind HTTP.

The judge sees question, sub-question, report and the passages retrieved for it, never a reference
answer (section C.4). Its hint is stored and not fed back. A judge that answers without a verdict
leaves its report without one; a judge that does not answer refuses the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from moopd.config import ConfigError, CriticConfig, WorkflowConfig
from moopd.engines.base import Engine
from moopd.http_client import NoAnswerError, Tries, address, failure, open_client, post
from moopd.roles.parsing import parse
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.types import GenerateRequest, Judgement, Message, Passage, Role, Trajectory


class JudgeError(RuntimeError):
    """The judge's endpoint is gone or is none; the step is to be redone, nothing was recorded."""


@dataclass(frozen=True, slots=True)
class ReportToJudge:
    question: str
    subtask: str
    report: str
    passages: tuple[Passage, ...]


class Judge(Protocol):
    def judge(self, reports: Sequence[ReportToJudge]) -> list[Judgement | None]:
        """One verdict per report; None where every try came back malformed.

        Raises JudgeError or EngineError when the judge itself is gone.
        """
        ...


class PolicyJudge:
    """A frozen policy as the critic role: temperature 0 first, sampled where that is malformed."""

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        prompts: Prompts,
        workflow: WorkflowConfig,
        config: CriticConfig,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._prompts = prompts
        self._max_tokens = workflow.max_output_tokens
        self._max_retries = config.max_retries

    def judge(self, reports: Sequence[ReportToJudge]) -> list[Judgement | None]:
        verdicts: list[Judgement | None] = [None] * len(reports)
        for attempt in range(self._max_retries + 1):
            open_ = [number for number, verdict in enumerate(verdicts) if verdict is None]
            requests = [self._request(reports[number], attempt, number) for number in open_]
            if not requests:
                break
            completions = self._engine.generate(requests)
            for number, (completion,) in zip(open_, completions, strict=True):
                cut = completion.finish == "length"
                action = parse(Role.CRITIC, completion.text, cut=cut)
                verdicts[number] = action if isinstance(action, Judgement) else None
        return verdicts

    def _request(self, report: ReportToJudge, attempt: int, number: int) -> GenerateRequest:
        messages = _messages(self._prompts, report)
        return GenerateRequest(
            prompt_ids=self._renderer.start(messages),
            num_candidates=1,
            max_tokens=self._max_tokens,
            temperature=0.0 if attempt == 0 else 0.7,
            top_p=1.0,
            seed=attempt * 1_000_003 + number,
        )


class HttpJudge:
    """A judge behind an OpenAI-compatible chat endpoint (SGLang's own server is one).

    Used from many threads: `critic.max_concurrent` bounds the requests of all of them together.
    """

    def __init__(self, config: CriticConfig, prompts: Prompts, backoff_s: float = 0.5) -> None:
        self._url = judge_address(config, "chat/completions")
        self._config = config
        self._prompts = prompts
        self._tries = Tries(config.max_tries, backoff_s)
        self._down = False
        self._client = open_client(self._url, config.timeout_s, config.max_concurrent)
        self._pool = ThreadPoolExecutor(config.max_concurrent, "judge")

    def judge(self, reports: Sequence[ReportToJudge]) -> list[Judgement | None]:
        return list(self._pool.map(self._one, reports))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._client.close()

    def _one(self, report: ReportToJudge) -> Judgement | None:
        for attempt in range(self._config.max_retries + 1):
            action = parse(Role.CRITIC, self._complete(report, 0.0 if attempt == 0 else 0.7))
            if isinstance(action, Judgement):
                return action
        return None

    def _complete(self, report: ReportToJudge, temperature: float) -> str:
        messages = [
            {"role": message.speaker, "content": message.content}
            for message in _messages(self._prompts, report)
        ]
        body = {
            "model": self._config.model or "default",
            "messages": messages,
            "temperature": temperature,
            "max_tokens": 256,
        }
        # One lost request refuses the step: the others need not wait through all their tries.
        tries = Tries(1) if self._down else self._tries
        try:
            text = post(self._client, self._url, body, tries, _chat_text)
        except NoAnswerError as error:
            self._down = True
            raise JudgeError(
                f"the judge: {error}; start it, or correct critic.url and critic.model, then run "
                "the step again"
            ) from None
        self._down = False
        return text


def judge_address(config: CriticConfig, route: str) -> Any:
    """URL of `route` under the endpoint's /v1, whether or not `critic.url` names that.

    Raises ConfigError where `critic.url` is no address.
    """
    if not config.url:
        raise ConfigError("critic.kind is http but critic.url is empty; set the endpoint's URL")
    try:
        base = address(config.url, "critic.url")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return base.copy_with(path=f"{base.path.rstrip('/').removesuffix('/v1')}/v1/{route}")


def require_judge(config: CriticConfig) -> str:
    """The address at which the endpoint answered.

    Raises JudgeError where it does not, ConfigError where `critic.url` is no address.
    """
    url = judge_address(config, "models")
    cause = failure(url)
    if cause is not None:
        raise JudgeError(f"{url} does not answer ({cause}); start it or correct critic.url")
    return str(url)


def _chat_text(answer: Any) -> str:
    """The message's text; empty where the model said nothing (it used its tokens up thinking)."""
    try:
        text = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        raise ValueError(f"a body that is no chat completion: {answer!r:.200}") from None
    return text if isinstance(text, str) else ""


def reports_to_judge(trajectory: Trajectory) -> dict[int, ReportToJudge]:
    """Subtask id -> its report with everything the judge may see."""
    return {
        report.subtask: ReportToJudge(
            question=trajectory.question.text,
            subtask=trajectory.subtasks[report.subtask].text,
            report=report.text,
            passages=tuple(
                passage
                for retrieval in trajectory.retrievals
                if retrieval.subtask == report.subtask
                for passage in retrieval.passages
            ),
        )
        for report in trajectory.reports
    }


def judge_trajectories(
    judge: Judge, trajectories: Sequence[Trajectory]
) -> list[dict[int, Judgement | None]]:
    """Verdicts per trajectory (subtask id -> verdict), all reports in one call of the judge."""
    keys: list[tuple[int, int]] = []
    reports: list[ReportToJudge] = []
    for number, trajectory in enumerate(trajectories):
        for subtask, report in reports_to_judge(trajectory).items():
            keys.append((number, subtask))
            reports.append(report)
    verdicts: list[dict[int, Judgement | None]] = [{} for _ in trajectories]
    for (number, subtask), verdict in zip(keys, judge.judge(reports), strict=True):
        verdicts[number][subtask] = verdict
    return verdicts


def _messages(prompts: Prompts, report: ReportToJudge) -> tuple[Message, ...]:
    return prompts.critic(report.question, report.subtask, report.report, report.passages)
