"""Rules: splits share no entity, practice no fact, every word is known, answers are right."""

from __future__ import annotations

from itertools import pairwise

import pytest

from moopd.config import WorldConfig
from moopd.data.world import World, build_world, practice_world
from moopd.data.world_words import vocabulary
from moopd.types import DATASETS

CONFIG = WorldConfig(seed=5, num_entities=200, num_train=200, num_dev=42, test_per_dataset=6)
WORLD = build_world(CONFIG)


def entities(world: World, split: str) -> set[str]:
    return {f.subject for q in world.questions[split] for f in world.plans[q.id].facts}


def test_splits_ask_about_disjoint_entities() -> None:
    train, dev, test = (entities(WORLD, split) for split in ("train", "dev", "test"))
    assert train and dev and test
    assert not (train & dev or train & test or dev & test)


def test_seven_sets_are_tested_and_two_are_trained() -> None:
    counts = dict.fromkeys(DATASETS, 0)
    for question in WORLD.questions["test"]:
        counts[question.dataset] += 1
    assert set(counts.values()) == {6}
    assert {q.dataset for q in WORLD.questions["train"]} == {"nq", "hotpotqa"}
    assert not any((q.num_hops or 0) > 2 for q in WORLD.questions["train"])


def test_practice_worlds_share_no_sentence_with_the_evaluated_one() -> None:
    told = {passage.text for passage in WORLD.passages}
    for seed in range(3):
        practice = practice_world(seed, 200, 60, WORLD)
        assert not told & {passage.text for passage in practice.passages}
        assert {q.dataset for q in practice.questions["train"]} <= set(DATASETS) - {
            "musique",
            "bamboogle",
        }


def test_every_word_is_in_the_vocabulary() -> None:
    known = set(vocabulary())
    texts = [p.text for p in WORLD.passages]
    texts += [t for qs in WORLD.questions.values() for q in qs for t in (q.text, *q.answers)]
    assert {word for text in texts for word in text.split()} <= known


def test_the_plan_leads_to_the_answer_and_its_facts_are_passages() -> None:
    by_id = {passage.id: passage.text for passage in WORLD.passages}
    for split in WORLD.questions.values():
        for question in split:
            plan = WORLD.plans[question.id]
            assert question.answers[0] == plan.answer
            assert [by_id[i] for i in question.support_ids] == [f.sentence for f in plan.facts]
            chain = [wave[0] for wave in plan.waves]
            for first, second in pairwise(chain):
                assert second.subject == first.value


def test_yes_and_no_are_balanced_and_typed() -> None:
    answers = [q.answers[0] for q in WORLD.questions["test"] if q.answer_type == "yes_no"]
    assert abs(answers.count("yes") - answers.count("no")) <= 1 and answers


def test_a_person_may_be_named_by_nickname() -> None:
    named = [q for q in WORLD.questions["test"] if q.family == "producer"]
    assert all(len(q.answers) == 2 for q in named) and named


def test_same_seed_same_world_and_too_many_entities_are_refused() -> None:
    assert build_world(CONFIG) == WORLD
    assert build_world(CONFIG.model_copy(update={"seed": 6})).passages != WORLD.passages
    with pytest.raises(ValueError, match="lower the size"):
        build_world(CONFIG.model_copy(update={"num_entities": 5000}))


def test_a_world_too_small_for_three_splits_is_refused_with_the_numbers() -> None:
    # 30 entities have 6 cities; those of dev go from round(0.6 x 6) = 4 to round(0.75 x 6) = 4.
    with pytest.raises(ValueError, match="leaves dev 2 films, 2 persons and 0 cities"):
        build_world(CONFIG.model_copy(update={"num_entities": 30}))


def test_no_question_is_asked_twice_within_or_across_splits() -> None:
    texts = [question.text for split in WORLD.questions.values() for question in split]
    assert len(texts) == len(set(texts))


def test_near_duplicates_crowd_a_search() -> None:
    titles = [p.title for p in WORLD.passages if "was directed by" in p.text]
    words = [set(title.split()) for title in titles]
    crowded = [sum(bool(a & b) for b in words) > 3 for a in words]
    assert sum(crowded) / len(crowded) > 0.9
