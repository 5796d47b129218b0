"""Rules: traces are the real workflows' own transcripts; each kind of noise does what it says."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import pytest

from moopd.config import SamplingConfig, TraceNoise, WorkflowConfig, WorldConfig
from moopd.data.world import World, build_world, practice_world
from moopd.engines.tiny_model import tiny_tokenizer
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.trainers.traces import TraceSequence, critic_sequence, play_trace, sequences
from moopd.trainers.world_player import WorldPlayer, world_sequences
from moopd.types import FormatError, Passage, Question, Role, Trajectory
from moopd.workflows.rollout import Team

TOKENIZER = tiny_tokenizer()
EVALUATED = build_world(WorldConfig(num_entities=100, num_train=20, num_dev=7, test_per_dataset=2))
PRACTICE = practice_world(0, 100, 60, EVALUATED)
Kind = Literal["cascade", "hierarchy"]


class MostWordsInCommon:
    """A retriever that ranks by shared words, over one world."""

    def __init__(self, world: World) -> None:
        self._passages = [(set(p.text.split()), p) for p in world.passages]

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [self._best(set(query.split()))[:top_k] for query in queries]

    def _best(self, query: set[str]) -> list[Passage]:
        return [p for _, p in sorted(self._passages, key=lambda item: -len(item[0] & query))]


RETRIEVER = MostWordsInCommon(PRACTICE)


def team(kind: Kind) -> Team:
    limits = WorkflowConfig(max_input_tokens=640, max_output_tokens=32)
    renderer = Renderer(TOKENIZER)
    return Team(kind, limits, Prompts("compact"), renderer, SamplingConfig(), 1, 3)


def noise(**only: float) -> TraceNoise:
    """No noise but the named kinds."""
    silent = dict.fromkeys(TraceNoise.model_fields, 0.0)
    return TraceNoise(**(silent | {"answer_right": 1.0} | only))


def play(
    kind: Kind, family: str, noise: TraceNoise, seed: int = 0
) -> tuple[Trajectory, WorldPlayer]:
    question = next(q for q in PRACTICE.questions["train"] if q.family == family)
    others = [fact for plan in PRACTICE.plans.values() for fact in plan.facts]
    player = WorldPlayer(
        question, PRACTICE.plans[question.id], noise, random.Random(seed), others, kind == "cascade"
    )
    return play_trace(team(kind), question, player, RETRIEVER), player


class Fixed:
    """A player that says given texts in turn."""

    def __init__(self, *texts: str) -> None:
        self._texts = iter(texts)

    def reply(self, ask: object) -> str:
        return next(self._texts)

    def saw(self, subtask: int, passages: Sequence[str]) -> None: ...


class OneFact:
    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [[Passage("p", "t", "year 1950")] for _ in queries]


def laid_out(trace: TraceSequence) -> str:
    """Words of a trace; what the policy generates stands in parentheses."""
    shown = TOKENIZER.convert_ids_to_tokens(list(trace.ids))
    marked = zip(shown, trace.generated, strict=True)
    return " ".join(f"({word})" if own else word for word, own in marked)


def test_token_layout_of_a_hierarchy_transcript_with_its_marks() -> None:
    question = Question("q", "nq", "when film out", ("1950",))
    player = Fixed(
        "<task> film </task>",
        "<search> film </search>",
        "<report> 1950 </report>",
        "<select> 1 </select>",
        "<answer> 1950 </answer>",
    )
    trajectory = play_trace(team("hierarchy"), question, player, OneFact())
    assert [laid_out(trace) for trace in sequences(trajectory)] == [
        "[user] leader question when film out [assistant] (<task>) (film) (</task>) ([end]) "
        "[user] report 1 1950 [assistant] (<select>) (1) (</select>) ([end])",
        "[user] searcher question when film out subtask film [assistant] "
        "(<search>) (film) (</search>) ([end]) "
        "[user] passage year 1950 [assistant] (<report>) (1950) (</report>) ([end])",
        "[user] answerer question when film out report 1 1950 [assistant] "
        "(<answer>) (1950) (</answer>) ([end])",
    ]
    for adequate, score in ((True, "1"), (False, "0")):
        judged = critic_sequence(team("hierarchy").renderer, Prompts("compact"), trajectory, 0,
                                 adequate)  # fmt: skip
        assert laid_out(judged) == (
            "[user] critic question when film out subtask film passage year 1950 report 1950 "
            f"[assistant] (<score>) ({score}) (</score>) ([end])"
        )


def test_the_judge_sees_the_passages_of_its_own_subtask() -> None:
    trajectory, player = play("hierarchy", "same_director", noise())
    for number, fact in enumerate(player.plan.facts):
        other = player.plan.facts[1 - number]
        judged = critic_sequence(team("hierarchy").renderer, Prompts("compact"), trajectory,
                                 number, True)  # fmt: skip
        assert f"passage {fact.sentence} " in laid_out(judged)
        found = {p.text for r in trajectory.retrievals if r.subtask == number for p in r.passages}
        assert (f"passage {other.sentence} " in laid_out(judged)) == (other.sentence in found)


@pytest.mark.parametrize("kind", ["cascade", "hierarchy"])
def test_every_generated_token_is_marked_once(kind: Kind) -> None:
    for seed in range(12):
        trajectory, _ = play(kind, "director_birthplace", TraceNoise(), seed)
        generated = sum(len(call.completions[0].token_ids) for call in trajectory.calls)
        assert sum(sum(trace.generated) for trace in sequences(trajectory)) == generated


def test_an_oracle_without_noise_follows_the_plan() -> None:
    trajectory, player = play("hierarchy", "director_birthplace", noise())
    first, second = player.plan.facts
    assert [s.text for s in trajectory.subtasks] == [first.subtask, second.subtask]
    assert [r.query for r in trajectory.retrievals] == [first.query, second.query]
    assert [r.text for r in trajectory.reports] == [first.sentence, second.sentence]
    # The chain's second hop is asked in a round of its own, and its report alone goes on.
    assert (trajectory.num_rounds, trajectory.selected) == (2, (2,))
    comparison, _ = play("hierarchy", "same_director", noise())
    assert (comparison.num_rounds, len(comparison.subtasks)) == (1, 2)


def test_each_kind_of_noise_does_what_it_says() -> None:
    chain, pair = "director_birthplace", "same_director"
    assert play("cascade", chain, noise(no_search=1))[0].num_searches == 0
    repeated = play("cascade", chain, noise(repeated_search=1))[0].retrievals
    assert len(repeated) > 2 and len({r.query for r in repeated}) == 1
    assert play("cascade", chain, noise(one_more_search=1))[0].num_searches == 3
    short = play("cascade", chain, noise(query_noise=1))
    assert len(short[0].retrievals[0].query.split()) == len(
        short[1].plan.facts[0].query.split()) - 1  # fmt: skip
    assert not play("hierarchy", chain, noise(answers_directly=1))[0].subtasks
    whole = play("hierarchy", chain, noise(passes_whole_question=1))[0]
    assert [s.text for s in whole.subtasks] == [whole.question.text]
    assert len(play("hierarchy", pair, noise(extra_task=1))[0].subtasks) == 3
    assert len(play("hierarchy", pair, noise(drops_report=1))[0].selected) == 1
    wrong = play("cascade", chain, noise(answer_right=0, answer_wrong=1))[0]
    assert wrong.answers not in (("none",), (wrong.question.answers[0],))
    assert play("cascade", chain, noise(answer_right=0))[0].answers == ("none",)
    slips = play("hierarchy", chain, noise(format_slip=1))[0]
    assert all(isinstance(action, FormatError) for call in slips.calls for action in call.actions)


def test_an_answer_needs_its_evidence() -> None:
    trajectory, player = play("cascade", "director_birthplace", noise(no_search=1))
    assert player.plan.facts[-1].sentence not in trajectory.reports[0].text
    # Without it the script guesses, however often `answer_right` says.
    assert trajectory.answers[0] in {fact.value for fact in player.others}
    assert trajectory.answers[0] not in trajectory.question.answers


def traces(kind: Kind, seed: int) -> list[TraceSequence]:
    rng = random.Random(seed)
    return list(world_sequences(PRACTICE, team(kind), TraceNoise(), RETRIEVER, rng))


def test_the_same_seed_writes_the_same_traces() -> None:
    assert traces("hierarchy", 3) == traces("hierarchy", 3) != traces("hierarchy", 4)


def test_all_roles_practise_and_both_verdicts_occur() -> None:
    found = [laid_out(trace).split() for trace in traces("hierarchy", 1)]
    assert {trace[1] for trace in found} == {str(role) for role in Role}
    verdicts = {trace[-3] for trace in found if trace[1] == "critic"}
    assert verdicts == {"(0)", "(1)"}


def test_every_word_of_an_evaluated_world_is_practised() -> None:
    # As many entities as the six practice worlds of scale tiny have.
    worlds = [practice_world(number, 100, 1, EVALUATED) for number in range(24)]
    seen = {word for world in worlds for p in world.passages for word in p.text.split()}
    told = {word for p in EVALUATED.passages for word in p.text.split()}
    assert told <= seen
