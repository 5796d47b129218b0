"""A synthetic world: facts about films, persons and cities, one sentence a passage, and questions.

Names mix small shared pools, so every word is trained while every held-out entity is new, and near
duplicates (other films with a shared word, persons with a shared name) crowd the top of a search.
Train, development and test ask about disjoint entities whose facts stay inside their split.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, product

from moopd.config import WorldConfig
from moopd.data import world_words as words
from moopd.types import Passage, Question

PRACTICE_SETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki")
"""Families of the warm start: three hops (musique) and bamboogle's chains are never trained."""


@dataclass(frozen=True, slots=True)
class Fact:
    """`relation` of `subject` is `value`; its passage says so in one sentence."""

    relation: str
    subject: str
    value: str
    passage_id: str

    @property
    def sentence(self) -> str:
        return words.SENTENCES[self.relation].format(self.subject, self.value)

    @property
    def query(self) -> str:
        return words.QUERIES[self.relation].format(self.subject)

    @property
    def subtask(self) -> str:
        return words.SUBTASKS[self.relation].format(self.subject)


@dataclass(frozen=True, slots=True)
class Plan:
    """How an oracle answers: waves of facts; those of one wave can be looked up in parallel."""

    waves: tuple[tuple[Fact, ...], ...]
    answer: str

    @property
    def facts(self) -> tuple[Fact, ...]:
        return tuple(fact for wave in self.waves for fact in wave)


@dataclass(frozen=True)
class World:
    """Passages of all splits in one corpus; questions per split; the oracle's plan per question."""

    passages: tuple[Passage, ...]
    questions: Mapping[str, tuple[Question, ...]]
    plans: Mapping[str, Plan]


@dataclass
class _Facts:
    """The facts of one split."""

    films: list[str]
    persons: list[str]
    cities: list[str]
    of: dict[tuple[str, str], Fact] = field(default_factory=dict)

    def __getitem__(self, key: tuple[str, str]) -> Fact:
        return self.of[key]


def build_world(config: WorldConfig) -> World:
    """The evaluated world of a seed; a set gets fewer questions where its entities give no more.

    Raises ValueError with more entities than names, or too few for three splits.
    """
    per_set = config.test_per_dataset
    layout = {
        "train": _Layout(0.6, _TRAIN_FAMILIES, config.num_train),
        "dev": _Layout(0.15, _FAMILIES, config.num_dev),
        "test": _Layout(0.25, _FAMILIES, per_set * len(_FAMILIES)),
    }
    return _build(config.seed, config.num_entities, layout, frozenset())


def practice_world(seed: int, num_entities: int, num_questions: int, avoid: World) -> World:
    """A world for the warm start: only `train` questions, no fact in common with `avoid`.

    Its seed tree is apart from that of evaluated worlds, whatever their seeds.
    """
    practised = {name: _FAMILIES[name] for name in PRACTICE_SETS}
    layout = {"train": _Layout(1.0, practised, num_questions)}
    sentences = frozenset(passage.text for passage in avoid.passages)
    return _build(f"practice {seed}", num_entities, layout, sentences)


Families = Mapping[str, Callable[["_Facts"], list[Iterator["_Draft"]]]]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How much of the entities a split gets, and what is asked about them."""

    share: float
    families: Families
    num_questions: int


def _build(
    seed: int | str, num_entities: int, layout: Mapping[str, _Layout], avoid: frozenset[str]
) -> World:
    rng = random.Random(seed)
    parts = _entities(num_entities, layout, rng)
    splits = {name: _facts(name, part, rng, avoid) for name, part in parts.items()}
    passages = [
        Passage(fact.passage_id, fact.subject, fact.sentence)
        for facts in splits.values()
        for fact in facts.of.values()
    ]
    rng.shuffle(passages)
    questions: dict[str, tuple[Question, ...]] = {}
    plans: dict[str, Plan] = {}
    for name, facts in splits.items():
        asked = list(_ask(name, facts, layout[name], rng))
        questions[name] = tuple(question for question, _ in asked)
        plans |= {question.id: plan for question, plan in asked}
    return World(tuple(passages), questions, plans)


def _entities(num: int, layout: Mapping[str, _Layout], rng: random.Random) -> dict[str, _Facts]:
    """Films, persons and cities in proportion 4 : 4 : 2, cut into the splits."""
    films = _names(words.FILM_FIRST, words.FILM_SECOND, num * 4 // 10, rng)
    persons = _names(words.FIRST_NAMES, words.LAST_NAMES, num * 4 // 10, rng)
    cities = _names(words.CITY_FIRST, words.CITY_SECOND, num * 2 // 10, rng)
    parts: dict[str, _Facts] = {}
    start = 0.0
    for name, split in layout.items():
        cut = partial(_cut, start, start + split.share)
        parts[name] = part = _Facts(cut(films), cut(persons), cut(cities))
        if not (part.films and part.persons and part.cities):
            raise ValueError(
                f"world of {num} entities leaves {name} {len(part.films)} films, "
                f"{len(part.persons)} persons and {len(part.cities)} cities; expected at least "
                "one of each, so raise num_entities"
            )
        start += split.share
    return parts


def _cut(start: float, end: float, pool: list[str]) -> list[str]:
    return pool[round(start * len(pool)) : round(end * len(pool))]


def _names(first: Sequence[str], second: Sequence[str], num: int, rng: random.Random) -> list[str]:
    pairs = [f"{a} {b}" for a, b in product(first, second)]
    if num > len(pairs):
        raise ValueError(f"world of {num} names needs more than {len(pairs)} pairs; lower the size")
    return rng.sample(pairs, num)


def _facts(split: str, facts: _Facts, rng: random.Random, avoid: frozenset[str]) -> _Facts:
    def add(relation: str, subject: str, values: Sequence[str]) -> None:
        identity = f"{split}-{len(facts.of):04d}"
        fact = Fact(relation, subject, rng.choice(values), identity)
        while fact.sentence in avoid:
            fact = Fact(relation, subject, rng.choice(values), identity)
        facts.of[relation, subject] = fact

    # Few directors and birthplaces, so that two films or persons often share one.
    directors = facts.persons[: max(3, len(facts.persons) // 2)]
    countries = _names(words.COUNTRY_FIRST, words.COUNTRY_SECOND, 12, rng)
    for film in facts.films:
        add("director", film, directors)
        add("producer", film, facts.persons)
        add("year", film, words.YEARS)
    for person in facts.persons:
        add("birthplace", person, facts.cities)
        add("occupation", person, words.OCCUPATIONS)
        add("nickname", person, [f"{title} {person.split()[1]}" for title in words.NICKNAMES])
    for city in facts.cities:
        add("country", city, countries)
        add("mayor", city, facts.persons)
    return facts


# ---------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class _Draft:
    text: str
    plan: Plan
    family: str
    yes_no: bool = False


def _one_hop(facts: _Facts, relation: str) -> Iterator[_Draft]:
    for (name, _), fact in facts.of.items():
        if name == relation:
            yield _Draft(fact.subtask, Plan(((fact,),), fact.value), relation)


def _chain(facts: _Facts, name: str, *relations: str) -> Iterator[_Draft]:
    """Questions that follow `relations` from an entity of the first one."""
    for (relation, subject), first in facts.of.items():
        if relation != relations[0]:
            continue
        hops = [first]
        for following in relations[1:]:
            hops.append(facts[following, hops[-1].value])
        plan = Plan(tuple((fact,) for fact in hops), hops[-1].value)
        yield _Draft(words.COMPOSED[name].format(subject), plan, name)


def _pairs(
    facts: _Facts, name: str, relation: str, subjects: Sequence[str],
    answer: Callable[[Fact, Fact], str | None],
) -> Iterator[_Draft]:  # fmt: skip
    """Questions that compare one relation of two entities."""
    for a, b in combinations(subjects, 2):
        pair = (facts[relation, a], facts[relation, b])
        value = answer(*pair)
        if value is not None:
            text = words.COMPOSED[name].format(a, b)
            yield _Draft(text, Plan((pair,), value), name, value in ("yes", "no"))


def _earlier(a: Fact, b: Fact) -> str | None:
    if a.value == b.value:
        return None
    return a.subject if int(a.value) < int(b.value) else b.subject


def _same(a: Fact, b: Fact) -> str:
    return "yes" if a.value == b.value else "no"


_FAMILIES: Families = {
    "nq": lambda f: [_one_hop(f, "director"), _one_hop(f, "birthplace"), _one_hop(f, "country")],
    "triviaqa": lambda f: [_one_hop(f, "producer"), _one_hop(f, "mayor")],
    "popqa": lambda f: [_one_hop(f, "year"), _one_hop(f, "occupation"), _one_hop(f, "nickname")],
    "hotpotqa": lambda f: [
        _chain(f, "director_birthplace", "director", "birthplace"),
        _pairs(f, "first_film", "year", f.films, _earlier),
    ],
    "2wiki": lambda f: [
        _pairs(f, "same_birthplace", "birthplace", f.persons, _same),
        _pairs(f, "same_director", "director", f.films, _same),
    ],
    "musique": lambda f: [
        _chain(f, "director_country", "director", "birthplace", "country"),
        _chain(f, "producer_country", "producer", "birthplace", "country"),
    ],
    "bamboogle": lambda f: [
        _chain(f, "producer_occupation", "producer", "occupation"),
        _chain(f, "mayor_occupation", "mayor", "occupation"),
    ],
}
"""Dataset -> its question families in development and test."""

_ONE_HOP = tuple(words.SUBTASKS)
_TRAIN_FAMILIES: Families = {
    "nq": lambda f: [_one_hop(f, relation) for relation in _ONE_HOP],
    "hotpotqa": lambda f: [*_FAMILIES["hotpotqa"](f), *_FAMILIES["2wiki"](f)],
}
"""Like the real ones, the two training sets cover many relations, comparisons and yes/no; three
hops (musique) and the chains of bamboogle are never trained."""


def _ask(
    split: str, facts: _Facts, layout: _Layout, rng: random.Random
) -> Iterator[tuple[Question, Plan]]:
    total, num_sets = layout.num_questions, len(layout.families)
    for place, dataset in enumerate(layout.families):
        num = total * (place + 1) // num_sets - total * place // num_sets
        drafts = _drafts(layout.families[dataset](facts), num, rng)
        for number, draft in enumerate(drafts):
            yield _question(f"{dataset}-{split}-{number:04d}", dataset, draft, facts), draft.plan


def _drafts(families: list[Iterator[_Draft]], num: int, rng: random.Random) -> list[_Draft]:
    """An even draw over the families of a set, and over the answers of yes/no families."""
    pools: list[list[_Draft]] = []
    for drafts in families:
        family = list(drafts)
        halves = [[d for d in family if d.plan.answer == answer] for answer in ("yes", "no")]
        for pool in halves if family and family[0].yes_no else [family]:
            rng.shuffle(pool)
            pools.append(pool)
    chosen: list[_Draft] = []
    while len(chosen) < num and any(pools):
        for pool in pools:
            if pool and len(chosen) < num:
                chosen.append(pool.pop())
    return chosen


def _question(identity: str, dataset: str, draft: _Draft, facts: _Facts) -> Question:
    answers = [draft.plan.answer]
    nickname = facts.of.get(("nickname", draft.plan.answer))
    if nickname is not None:
        answers.append(nickname.value)
    return Question(
        id=identity,
        dataset=dataset,
        text=draft.text,
        answers=tuple(answers),
        answer_type="yes_no" if draft.yes_no else "span",
        family=draft.family,
        num_hops=len(draft.plan.waves) if len(draft.plan.waves) > 1 else len(draft.plan.facts),
        support_ids=tuple(fact.passage_id for fact in draft.plan.facts),
    )
