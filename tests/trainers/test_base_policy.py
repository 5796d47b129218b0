"""Rules: traces mark exactly what the policy says; the warm start learns and is reproducible."""

from __future__ import annotations

import random

import pytest
import torch

from moopd.config import (
    ModelConfig,
    SamplingConfig,
    TraceNoise,
    WarmStartConfig,
    WorkflowConfig,
    WorldConfig,
)
from moopd.data.world import World, build_world, practice_world
from moopd.engines.tiny_model import build_tiny, tiny_tokenizer
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.trainers.critic_check import _compare
from moopd.trainers.support_player import SupportPlayer, evidence, support_sequences
from moopd.trainers.traces import play_trace
from moopd.trainers.warm_start import warm_start
from moopd.trainers.world_player import is_adequate, world_sequences
from moopd.types import FormatError, Judgement, Message, Passage, Question
from moopd.workflows.rollout import Team

TOKENIZER = tiny_tokenizer()
SMALL = WorldConfig(num_entities=100, num_train=20, num_dev=7, test_per_dataset=2)
PRACTICE = practice_world(0, 100, 40, build_world(SMALL))


class Perfect:
    """Finds the passage that a query is about: most words in common."""

    def __init__(self, world: World) -> None:
        self._passages = world.passages

    def search(self, queries: list[str], top_k: int) -> list[list[Passage]]:
        return [
            sorted(self._passages, key=lambda p: -len(set(p.text.split()) & set(q.split())))[:top_k]
            for q in queries
        ]


def team(kind: str = "hierarchy") -> Team:
    limits = WorkflowConfig(max_input_tokens=640, max_output_tokens=32)
    renderer = Renderer(TOKENIZER)
    return Team(kind, limits, Prompts("compact"), renderer, SamplingConfig(), 1, 3)  # type: ignore[arg-type]


def no_noise() -> TraceNoise:
    return TraceNoise(**dict.fromkeys(TraceNoise.model_fields, 0.0) | {"answer_right": 1.0})


@pytest.mark.parametrize("kind", ["cascade", "hierarchy"])
def test_without_noise_every_question_is_answered_rightly_in_its_plan(kind: str) -> None:
    from moopd.rl.rewards import team_outcome
    from moopd.trainers.world_player import WorldPlayer

    others = [fact for plan in PRACTICE.plans.values() for fact in plan.facts]
    for question in PRACTICE.questions["train"][:20]:
        plan = PRACTICE.plans[question.id]
        player = WorldPlayer(
            question, plan, no_noise(), random.Random(0), others, kind == "cascade"
        )
        trajectory = play_trace(team(kind), question, player, Perfect(PRACTICE))
        assert team_outcome(trajectory) == 1.0, question.text
        assert not any(isinstance(a, FormatError) for c in trajectory.calls for a in c.actions)
        assert trajectory.num_searches == len(plan.facts)


def test_marks_cover_what_is_generated_and_nothing_else() -> None:
    traces = list(
        world_sequences(PRACTICE, team(), TraceNoise(), Perfect(PRACTICE), random.Random(1))
    )
    assert len(traces) > 100
    end = TOKENIZER.eos_token_id
    for trace in traces:
        assert TOKENIZER.unk_token_id not in trace.ids
        said = [token for token, own in zip(trace.ids, trace.generated, strict=True) if own]
        assert trace.generated[0] is False and said[-1] == end
        # Every end token was generated: prompts hold none of their own in this template.
        assert said.count(end) == trace.ids.count(end)


def test_the_warm_start_lowers_the_loss_and_is_reproducible() -> None:
    traces = list(
        world_sequences(PRACTICE, team(), TraceNoise(), Perfect(PRACTICE), random.Random(1))
    )
    config = WarmStartConfig(steps=40, lr=5e-3, tokens_per_batch=1500, drill_steps=4)
    runs = []
    for _ in range(2):
        model, _tokenizer = build_tiny(ModelConfig(hidden_size=32), seed=3)
        losses: list[float] = []
        warm_start(model, TOKENIZER.pad_token_id, traces, config, 0,
                   lambda _, m, to=losses: to.append(m["warm_start/loss"]))  # fmt: skip
        runs.append((losses, torch.cat([p.detach().flatten() for p in model.parameters()])))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0][-1] < runs[0][0][0] - 0.5
    with pytest.raises(ValueError, match="no warm-start traces"):
        warm_start(model, 0, [], config, 0, lambda *_: None)


def test_control_tokens_cannot_be_spelled_by_text() -> None:
    ids = Renderer(TOKENIZER).start([Message("user", "who [end] [assistant] [pad]")])
    assert TOKENIZER.eos_token_id not in ids and TOKENIZER.pad_token_id not in ids


def test_the_tiny_policy_is_small_and_its_seed_decides() -> None:
    model, _ = build_tiny(ModelConfig(), 0)
    assert 200_000 < sum(p.numel() for p in model.parameters()) < 260_000
    first, second, other = (
        next(build_tiny(ModelConfig(), seed)[0].parameters()) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, other)


def test_evidence_is_the_supporting_sentence_with_the_answer() -> None:
    question = Question("q", "nq", "who?", ("Ada Lovelace",), support_ids=("p",))
    passage = Passage("p", "t", "It was long ago. The notes are by Ada Lovelace. Others followed.")
    assert evidence(question, [passage]) == "The notes are by Ada Lovelace."
    assert evidence(question, []) == "nothing found."
    player = SupportPlayer(question, [passage])
    assert player.question is question
    traces = list(support_sequences([question], {"p": passage}, team(), Perfect(PRACTICE)))
    assert len(traces) == 3  # Leader, Searcher, Answerer


def test_agreement_counts_malformed_verdicts_against_the_judge() -> None:
    verdicts = [Judgement(1, ""), Judgement(0, ""), Judgement(1, ""), None]
    found = _compare(verdicts, [True, True, False, False])
    # right: the first alone; adequate: two of four; malformed: one of four
    assert (found.agreement, found.adequate, found.malformed) == (0.25, 0.5, 0.25)
    fact = next(iter(PRACTICE.plans.values())).facts[-1]
    assert is_adequate(f"so {fact.sentence}", (fact,)) and not is_adequate("none", (fact,))
