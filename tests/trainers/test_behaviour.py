"""Rules: shares count workflows, repeats count queries, the alarm needs a fall from searching."""

from __future__ import annotations

import pytest

from moopd.trainers.behaviour import behaviour, search_collapsed
from tests.support import REPORT, SEARCH, answer, play


def test_two_workflows_by_hand() -> None:
    # One searches twice for the same and answers right; one reports at once and answers wrong.
    first = play("cascade", [SEARCH, SEARCH, REPORT, answer("x")])
    second = play("cascade", [REPORT, "nonsense"])
    found = behaviour([first, second])
    assert (found["em"], found["no_search"], found["searches"]) == (0.5, 0.5, 1.0)
    assert (found["repeated_queries"], found["with_reports"], found["with_answer"]) == (0.5, 1, 0.5)
    assert found["malformed_answerer"] == 0.5 and found["malformed_searcher"] == 0.0
    assert first.num_repeated_queries == 1
    # Turns of "<tag> word </tag> [eos]", 4 tokens: 4 of them, then 1 and one of 2 tokens.
    assert (first.output_tokens, second.output_tokens) == (16, 6)
    assert found["output_tokens"] == 11.0


def test_em_is_the_first_candidate_and_an_answer_must_be_well_formed() -> None:
    # Candidates: malformed, wrong, right; and three malformed ones. A malformed turn of another
    # role is no malformed Answerer.
    mixed = play("cascade", ["hm", REPORT, ["hm", answer("y"), answer("x")]], num_candidates=3)
    none = play("cascade", [REPORT, ["hm", "hm", "hm"]], num_candidates=3)
    found = behaviour([mixed, none])
    assert (found["em"], found["em_any"], found["with_answer"]) == (0.0, 0.5, 0.5)
    # Searcher: 1 of 3 turns. Answerer: 4 of 6 candidates.
    assert found["malformed_searcher"] == pytest.approx(1 / 3, abs=1e-12)
    assert found["malformed_answerer"] == pytest.approx(4 / 6, abs=1e-12)


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
