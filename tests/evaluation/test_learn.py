"""The tables of `make learn`, on made-up records."""

from __future__ import annotations

import pytest

from benchmarks.learn import GAPS, interval, macro, malformed_turns
from moopd.evaluation.results import Results
from tests.evaluation import made
from tests.evaluation.test_analysis import QUESTIONS, results_of


@pytest.fixture(scope="module")
def results() -> Results:
    return results_of()


def test_a_gap_is_in_percentage_points(results: Results) -> None:
    row = results.system("cmas_rl")
    assert macro(results, "cmas_rl", "strict") == row.strict["avg"].macro.value
    right = row.histogram
    share = sum(k * n for k, n in enumerate(right)) / (4 * sum(right))
    assert macro(results, "cmas_rl", "strict") == pytest.approx(100 * share)


def test_every_gap_is_between_rows_of_the_report(results: Results) -> None:
    names = {system.name for system in results.systems}
    assert {name for row, other, _ in GAPS for name in (row, other)} <= names


def test_malformed_turns_are_a_share_of_all_turns(results: Results) -> None:
    records = made.records("cmas_base", QUESTIONS)
    refused = sum(sum(record.format_failures.values()) for record in records)
    turns = sum(record.num_calls for record in records)
    assert refused > 0
    assert malformed_turns(results, "cmas_base") == pytest.approx(100 * refused / turns)


def test_interval_is_students_over_seeds() -> None:
    # mean 2, standard error 1 / sqrt(3), t(0.975, 2 degrees) = 4.302653
    low, high = interval([1.0, 2.0, 3.0])
    assert (low, high) == (
        pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-5),
        pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-5),
    )
