"""Rules: shares count workflows, repeats count queries, the alarm needs a fall from searching."""

from __future__ import annotations

import pytest

from moopd.trainers.behaviour import behaviour, num_repeated_queries, search_collapsed
from tests.support import REPORT, SEARCH, answer, play


def test_two_workflows_by_hand() -> None:
    # One searches twice for the same and answers right; one reports at once and answers wrong.
    first = play("cascade", [SEARCH, SEARCH, REPORT, answer("x")])
    second = play("cascade", [REPORT, "nonsense"])
    found = behaviour([first, second])
    assert (found["em"], found["no_search"], found["searches"]) == (0.5, 0.5, 1.0)
    assert (found["repeated_queries"], found["with_reports"], found["with_answer"]) == (0.5, 1, 0.5)
    assert found["malformed_answerer"] == 0.5 and found["malformed_searcher"] == 0.0
    assert num_repeated_queries(first) == 1


@pytest.mark.parametrize(
    ("shares", "alarm"),
    [
        ([0.005, 0.1, 1.0], True),  # section A.5: 0.5 % to 100 %
        ([0.005, 0.1, 0.4], False),
        ([0.9, 1.0], False),  # never searched: a bad base, no collapse
        ([0.1, 0.6, 0.3], False),  # it recovered
        ([], False),
    ],
)
def test_the_alarm_rings_when_searching_stops(shares: list[float], alarm: bool) -> None:
    history = [{"step": float(n), "dev/no_search": share} for n, share in enumerate(shares)]
    assert search_collapsed([{"step": 0.0}, *history]) is alarm
