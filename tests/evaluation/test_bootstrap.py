"""The question bootstrap: closed forms, pairing, reproducibility, coverage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from moopd.config import StatisticsConfig
from moopd.evaluation.attempts import QuestionSet, question_set
from moopd.evaluation.bootstrap import (
    Sampled,
    bootstrap,
    intervals,
    mean_of_runs,
    over_runs,
    question_draws,
)
from moopd.evaluation.metrics import Column, whole
from moopd.types import DATASETS, Question

CONFIG = StatisticsConfig()


def asked(**sizes: int) -> QuestionSet:
    return question_set(
        Question(f"{name}{k:05d}", name, "?", ("x",)) for name, n in sizes.items() for k in range(n)
    )


def one(values: Sequence[float], questions: QuestionSet, divisor: float = 1.0) -> Sampled:
    return bootstrap({"a": whole(values, divisor)}, questions, CONFIG)["a"]


def test_one_question_has_no_spread() -> None:
    sampled = one([3], asked(nq=1), divisor=4)
    assert sampled.point == (0.75, 0.75)
    assert intervals([sampled], 0.95)[0] == ((0.75, 0.75), (0.75, 0.75))


def test_two_questions_by_hand() -> None:
    # Values 0 and 1: a draw holds (0,0), (0,1), (1,0) or (1,1) with probability 1/4 each, so its
    # mean is 0, 1/2, 1 with 1/4, 1/2, 1/4. The 2.5 % point is 0, the 97.5 % point 1.
    draws = one([0, 1], asked(nq=2)).draws[0]
    assert set(draws) == {0.0, 0.5, 1.0}
    assert np.mean(draws == 0.5) == pytest.approx(0.5, abs=0.03)  # 3.8 standard errors
    assert intervals([one([0, 1], asked(nq=2))], 0.95)[0][0] == (0.0, 1.0)


def test_draws_are_means_of_the_drawn_questions() -> None:
    questions = asked(nq=3, bamboogle=2)
    sampled = one([4, 2, 0, 1, 3], questions, divisor=4)
    nq = question_draws(questions.ids[:3], "nq", 4000, 0)
    bamboogle = question_draws(questions.ids[3:], "bamboogle", 4000, 0)
    assert (nq.sum(axis=1) == 3).all() and (bamboogle.sum(axis=1) == 2).all()
    for k in range(20):
        in_nq = (4 * int(nq[k, 0]) + 2 * int(nq[k, 1])) / 4 / 3
        in_bamboogle = (int(bamboogle[k, 0]) + 3 * int(bamboogle[k, 1])) / 4 / 2
        assert sampled.draws[:, k].tolist() == pytest.approx(
            [in_nq, in_bamboogle, (in_nq + in_bamboogle) / 2], abs=1e-12
        )


def test_spread_has_its_closed_form() -> None:
    # Var(mean of a draw) = population variance / n in a set; the macro mean of two sets has
    # (v1/n1 + v2/n2) / 4. nq: 300 of 1000 right -> 0.21/1000; bamboogle: 60 of 125 -> 0.2496/125.
    values = [1] * 300 + [0] * 700 + [1] * 60 + [0] * 65
    draws = one(values, asked(nq=1000, bamboogle=125)).draws
    assert draws[0].std() == pytest.approx((0.21 / 1000) ** 0.5, rel=0.04)
    assert draws[1].std() == pytest.approx((0.2496 / 125) ** 0.5, rel=0.04)
    macro = ((0.21 / 1000 + 0.2496 / 125) / 4) ** 0.5
    assert draws[2].std() == pytest.approx(macro, rel=0.04)


def test_differences_are_paired() -> None:
    # A = (1, 0), B = (0, 1): a draw holds question 0 twice, once each, or question 1 twice, and
    # A - B is 1, 0, -1. Without pairing, halves would appear.
    questions = asked(nq=2)
    made = bootstrap({"a": whole([1, 0]), "b": whole([0, 1])}, questions, CONFIG)
    assert set((made["a"] - made["b"]).draws[0]) == {-1.0, 0.0, 1.0}


def test_a_against_a_is_zero() -> None:
    rng = np.random.default_rng(5)
    questions = asked(nq=40, musique=30)
    column = whole(rng.integers(0, 4, 70), 3)
    made = bootstrap({"a": column, "b": column, "c": whole(rng.integers(0, 4, 70), 3)}, questions,
                     CONFIG)  # fmt: skip
    assert intervals([made["a"] - made["b"]], 0.95)[0] == ((0.0, 0.0),) * 3


def test_same_seed_same_bytes_and_neighbours_do_not_matter() -> None:
    rng = np.random.default_rng(5)
    questions = asked(nq=50, popqa=20)
    column = whole(rng.integers(0, 5, 70), 4)
    alone = one(list(column.values), questions, 4)
    crowd: dict[str, Column] = {f"s{k}": whole(rng.integers(0, 5, 70), 4) for k in range(12)}
    question_draws.cache_clear()
    among = bootstrap({**crowd, "a": column}, questions, CONFIG)["a"]
    assert alone.draws.tobytes() == among.draws.tobytes()
    other = bootstrap({"a": column}, questions, StatisticsConfig(seed=1))["a"]
    assert alone.draws.tobytes() != other.draws.tobytes()


def test_intervals_of_many_are_those_of_each() -> None:
    questions = asked(nq=5)
    samples = [one([k % 3, 1, 0, k % 2, 2], questions, 2) for k in range(20)]
    assert intervals(samples, 0.9) == [intervals([sample], 0.9)[0] for sample in samples]


def test_sets_of_other_questions_get_other_draws() -> None:
    first = question_draws(("a", "b", "c"), "nq", 50, 0)
    assert (first != question_draws(("a", "b", "d"), "nq", 50, 0)).any()
    assert (first != question_draws(("a", "b", "c"), "popqa", 50, 0)).any()


def test_coverage_of_the_interval() -> None:
    """2,000 simulated test sets; the 95 % interval holds the true macro mean in 93 to 97 %.

    Simulations stand as columns: they share the draws of the bootstrap, their data are independent.
    """
    sizes = dict(zip(DATASETS, (60, 60, 60, 50, 50, 50, 40), strict=True))
    questions = asked(**sizes)
    rng = np.random.default_rng(20_240)
    rows = []
    truth = []
    for place, size in enumerate(sizes.values()):
        # A question's chance is Beta(a, b); mean a / (a + b).
        a, b = 0.6 + 0.2 * place, 1.2
        truth.append(a / (a + b))
        rows.append(rng.binomial(4, rng.beta(a, b, (size, 2000))))
    values = np.concatenate(rows)
    columns = {k: whole(values[:, k], 4) for k in range(2000)}
    found = [of_names[-1] for part in range(0, 2000, 500) for of_names in _macro(
        {k: columns[k] for k in range(part, part + 500)}, questions)]  # fmt: skip
    expected = sum(truth) / len(truth)
    covered = np.mean([low <= expected <= high for low, high in found])
    assert 0.93 <= covered <= 0.97


def _macro(
    columns: dict[int, Column], questions: QuestionSet
) -> list[tuple[tuple[float, float], ...]]:
    sampled = bootstrap(columns, questions, StatisticsConfig(num_draws=1000))
    only = [Sampled(("macro",), one.point[-1:], one.draws[-1:]) for one in sampled.values()]
    return intervals(only, 0.95)  # type: ignore[return-value]


# ---------------------------------------------------------------- runs


def runs_of(*rows: Sequence[float]) -> dict[int, Sampled]:
    questions = asked(nq=len(rows[0]))
    return {k: one(row, questions) for k, row in enumerate(rows)}


def test_hierarchical_bootstrap_adds_the_spread_between_runs() -> None:
    # Every question alike: no spread over questions. Runs 0, 0, 1: a draw of 3 runs averages 0,
    # 1/3, 2/3 or 1 with 8/27, 12/27, 6/27, 1/27, so the upper 97.5 % point is 1 (1/27 > 2.5 %).
    runs = runs_of([0, 0], [0, 0], [1, 1])
    sampled = over_runs(runs, CONFIG)
    assert set(np.round(sampled.draws[0] * 3)) == {0.0, 1.0, 2.0, 3.0}
    assert np.mean(sampled.draws[0] == 0) == pytest.approx(8 / 27, abs=0.03)
    assert intervals([sampled], 0.95)[0][0] == (0.0, 1.0)
    assert sampled.point[0] == pytest.approx(1 / 3, abs=1e-15)
    assert intervals([mean_of_runs(list(runs.values()))], 0.95)[0][0] == pytest.approx(
        (1 / 3, 1 / 3), abs=1e-15
    )


def test_rows_trained_with_the_same_seeds_are_paired_by_seed() -> None:
    # A scores 2 and 4 in its two runs, B 1 and 3: paired by seed, A leads by 1 whatever is drawn;
    # with runs drawn apart the lead would also be -1 and 3.
    first, second = runs_of([2, 2], [4, 4]), runs_of([1, 1], [3, 3])
    assert set((over_runs(first, CONFIG) - over_runs(second, CONFIG)).draws[0]) == {1.0}
    apart = {7 + run: sampled for run, sampled in second.items()}
    assert set((over_runs(first, CONFIG) - over_runs(apart, CONFIG)).draws[0]) == {
        -1.0, 0.0, 1.0, 2.0, 3.0,
    }  # fmt: skip


def test_the_order_in_which_runs_are_given_does_not_matter() -> None:
    runs = runs_of([0, 0], [1, 1], [4, 4])
    backwards = dict(reversed(runs.items()))
    assert over_runs(runs, CONFIG).draws.tobytes() == over_runs(backwards, CONFIG).draws.tobytes()


def test_other_sets_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="same sets"):
        _ = one([0, 1], asked(nq=2)) - one([0, 1], asked(popqa=2))
