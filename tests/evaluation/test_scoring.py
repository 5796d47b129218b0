"""Strict and flexible score, and the metrics over four attempts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moopd.config import ConfigError
from moopd.evaluation.attempts import arrange, question_set
from moopd.evaluation.metrics import MACRO, majority_attempt, metric_columns, set_means
from moopd.evaluation.records import to_table
from moopd.evaluation.scoring import Verdicts, extract_strict, load_rules, score
from moopd.roles.parsing import parse_answerer
from moopd.types import EvalRecord, GiveAnswer, Question

RULES = load_rules()

CASES = [
    # output, strict, flexible
    ("<answer>Paris</answer>", "Paris", "Paris"),
    ("first <answer>A b</answer> then <answer>Paris</answer> so", "Paris", "Paris"),
    ("<answer>Paris", None, "Paris"),
    ("<ANSWER> Paris </ANSWER>", None, "Paris"),
    ("<answer type='x'>Paris</ answer >", None, "Paris"),
    ("so \\boxed{Paris}", None, "Paris"),
    ('{"answer": "Paris"}', None, "Paris"),
    ("**Final answer:** Paris.\nBecause.", None, "Paris"),
    ("I think that the answer is Paris. It lies there.", None, "Paris"),
    ("Paris", None, "Paris"),
    ("<think>the answer is Rome</think> Paris", None, "Paris"),
    ("<think>the answer is Rome", None, None),
    ("<answer></answer>", None, None),
    ("", None, None),
    ("A long explanation that never commits to anything in particular and goes on and on.",
     None, None),
]  # fmt: skip


@pytest.mark.parametrize(("output", "strict", "flexible"), CASES)
def test_extraction(output: str, strict: str | None, flexible: str | None) -> None:
    assert extract_strict(output)[0] == strict
    assert RULES.extract(output) == flexible


@pytest.mark.parametrize("output", [case[0] for case in CASES])
def test_strict_extraction_is_the_answerer_parser(output: str) -> None:
    action = parse_answerer(output)
    expected = action.text if isinstance(action, GiveAnswer) else None
    assert extract_strict(output)[0] == expected


def test_failure_kinds_tell_missing_from_malformed() -> None:
    assert extract_strict("")[1] == "missing"
    assert extract_strict("Paris")[1] == "no_action"
    assert extract_strict("<answer>Paris")[1] == "unclosed"
    assert extract_strict("<answer>Paris</answer>")[1] is None


def test_rules_need_one_group(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text("version: 1\nstrip: ' '\nrules: [{name: bad, pattern: 'x'}]\n")
    with pytest.raises(ConfigError, match="'bad' needs exactly one group"):
        load_rules(path)


def test_long_answers_are_read_whole() -> None:
    text = "word " * 5000
    assert extract_strict(f"<answer>{text}</answer>")[0] == text.strip()


def test_scores_keep_malformed_outputs_in_the_denominator() -> None:
    questions = question_set([Question("q", "nq", "?", ("Paris", "Paname"))])
    outputs = ["<answer>the Paris!</answer>", "<answer>Rome</answer>", "Paris", ""]
    records = [
        EvalRecord("s", "q", "nq", k, text, "answered", 0, 0, 0, 0, 0, 0, 0, 0, 0)
        for k, text in enumerate(outputs)
    ]
    scored = score(arrange(to_table(records), questions), RULES)
    assert scored.strict.correct.tolist() == [[True, False, False, False]]
    assert scored.flexible.correct.tolist() == [[True, False, True, False]]
    assert scored.failures == (None, None, "no_action", "missing")


# ---------------------------------------------------------------- metrics


def verdicts(correct: list[list[bool]], answers: list[str | None]) -> Verdicts:
    return Verdicts(tuple(answers), np.array(correct))


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        (["a", "b", "b", "c"], 1),
        (["x", "y", "y", "x"], 0),  # two votes each: the earliest attempt's answer
        ([None, "y", None, "x"], 1),  # attempts without an answer do not vote
        (["The Paris", "rome", "paris!", "rome 2"], 0),  # votes are normalised answers
        (["!!!", "the", "x", None], 2),  # what normalises to nothing does not vote
        ([None, None, None, None], None),
    ],
)
def test_majority(answers: list[str | None], winner: int | None) -> None:
    assert majority_attempt(answers) == winner


def test_metrics_by_hand() -> None:
    # q0 (nq): right, right, wrong, right -> avg 3/4, pass 1, all 0; x x y x -> maj 1
    # q1 (nq): all right                  -> avg 1,   pass 1, all 1; x x x x -> maj 1
    # q2 (bamboogle): only the last right -> avg 1/4, pass 1, all 0; y y z x -> maj 0
    correct = [[True, True, False, True], [True] * 4, [False, False, False, True]]
    answers: list[str | None] = [*"xxyx", *"xxxx", *"yyzx"]
    columns = metric_columns(verdicts(correct, answers))
    sets = {"nq": slice(0, 2), "bamboogle": slice(2, 3)}
    # macro: equal weight of sets, not of questions
    assert set_means(columns["avg"], sets) == {
        "nq": 7 / 8,
        "bamboogle": 1 / 4,
        MACRO: (7 / 8 + 1 / 4) / 2,
    }
    assert set_means(columns["pass"], sets)[MACRO] == 1.0
    assert set_means(columns["all"], sets)[MACRO] == 0.25
    assert set_means(columns["maj"], sets)[MACRO] == 0.5
