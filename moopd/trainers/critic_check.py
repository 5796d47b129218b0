"""How often the judge agrees with the world's truth: measured before any critic row is trained."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moopd.config import TraceNoise
from moopd.data.world import World
from moopd.retrieval.base import Retriever
from moopd.rl.critic import Judge, ReportToJudge, reports_to_judge
from moopd.trainers.traces import play_trace
from moopd.trainers.world_player import WorldPlayer, is_adequate
from moopd.types import Judgement
from moopd.workflows.rollout import Team


@dataclass(frozen=True, slots=True)
class Agreement:
    """Shares over judged reports; a verdict that stays malformed counts as disagreement."""

    num_reports: int
    agreement: float
    adequate: float
    """Share that the world calls adequate: what always saying 1 would agree with."""
    malformed: float

    def metrics(self) -> dict[str, float]:
        return {f"critic/{name}": float(value) for name, value in asdict(self).items()}


def critic_agreement(
    judge: Judge,
    world: World,
    team: Team,
    retriever: Retriever,
    noise: TraceNoise,
    seed: int,
    num_questions: int = 200,
) -> Agreement:
    """Let the judge score scripted reports of a world that it was not trained on."""
    rng = random.Random(seed)
    others = [fact for plan in world.plans.values() for fact in plan.facts]
    reports: list[ReportToJudge] = []
    truth: list[bool] = []
    for question in world.questions["train"][:num_questions]:
        player = WorldPlayer(question, world.plans[question.id], noise, rng, others, cascade=False)
        trajectory = play_trace(team, question, player, retriever)
        for subtask, report in reports_to_judge(trajectory).items():
            reports.append(report)
            truth.append(is_adequate(report.report, player.target(subtask)))
    return _compare(judge.judge(reports), truth)


def _compare(verdicts: Sequence[Judgement | None], truth: Sequence[bool]) -> Agreement:
    if not truth:
        raise ValueError("no report to judge; expected scripted traces with at least one report")
    pairs = list(zip(verdicts, truth, strict=True))
    return Agreement(
        num_reports=len(pairs),
        agreement=sum(v is not None and bool(v.score) == t for v, t in pairs) / len(pairs),
        adequate=sum(truth) / len(pairs),
        malformed=sum(v is None for v in verdicts) / len(pairs),
    )
