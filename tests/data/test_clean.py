"""Repairs of text and answers, and what each must not touch."""

from __future__ import annotations

import pytest

from moopd.data.clean import (
    Candidate,
    Rule,
    clean_answers,
    clean_question,
    clean_row,
    clean_text,
    published_answers,
)
from moopd.data.sources import RawRow, Removal


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # per cent escapes: two hex digits that decode to something printable
        ("Why Won%27t They%3F", "Why Won't They?"),
        ("100%25 agave", "100% agave"),
        ("Caf%C3%A9", "Café"),
        ("50% of voters", "50% of voters"),
        ("100%ad space", "100%ad space"),  # 0xAD alone is no UTF-8
        ("5%00 off", "5%00 off"),  # a control character is no text
        # entities: whole ones, until nothing changes
        ("H &amp;amp;amp; W", "H & W"),
        ("caf&eacute; &#8364;5 &#x41;", "café €5 A"),
        ("R&notes and AT&T; and R&B;", "R&notes and AT&T; and R&B;"),
        ("R&notes; here", "R&notes; here"),  # begins like &not, is no entity
        # Unicode
        ("Cafe\u0301\u00a0Lumen\u200b", "Café Lumen"),
        ("the film \x91Ghost\x92\x85", "the film ‘Ghost’…"),  # Windows-1252 as control characters
        ("bad\x00 \x7fbyte", "bad byte"),
        ("Tarn’s “Fair” – 5″", "Tarn’s “Fair” – 5″"),
        # CSV fields read as text
        ('"""FRIDGE"""', '"FRIDGE"'),
        ('"""Babe"" Ruth"', '"Babe" Ruth'),
        ('"Blue" or "Red"', '"Blue" or "Red"'),
        ('""', '""'),
        # tokeniser's spaces
        ("Odile ( née Finn ) , 1971 .", "Odile (née Finn), 1971."),
        ("carver 's, the carvers ' s", "carver's, the carvers ' s"),
        ("at the .05 level of .pl", "at the .05 level of .pl"),
        ("letter 's' here", "letter 's' here"),
        ("  two   spaces\tand\r\nlines ", "two spaces and lines"),
    ],
)
def test_text(text: str, expected: str) -> None:
    assert clean_text(text)[0] == expected
    assert clean_text(expected)[0] == expected  # a second pass changes nothing


@pytest.mark.parametrize(
    ("text", "expected", "repaired"),
    [
        ("JÃ¶rg MÃ¼nz", "Jörg Münz", True),
        ("161.8Â\u00a0cm", "161.8 cm", True),
        ("voilÃ\u00a0", "voilà", True),  # the last byte looks like white space
        ("Açores", "Açores", False),
        ("Ã", "Ã", False),
        ("東京", "東京", False),
        ("plain", "plain", False),
    ],
)
def test_mojibake(text: str, expected: str, repaired: bool) -> None:
    assert clean_text(text) == (expected, repaired)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("who", "who?"),
        ("who ? ? ", "who?"),
        ("which ...?", "which ...?"),
        ('who sang "Why?"', 'who sang "Why?"?'),
        (" ?? ", ""),
        ("", ""),
        ("\u200b", ""),
    ],
)
def test_exactly_one_question_mark(text: str, expected: str) -> None:
    assert clean_question(text)[0] == expected


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("['Mira', \"O'Kolt\"]", ("Mira", "O'Kolt")),
        ('["a b", ["c"]]', ("a b", "c")),
        ("[REC] Harbour", ("[REC] Harbour",)),
        ("[REC]", ("[REC]",)),
        ("[__import__('os')]", ("[__import__('os')]",)),  # parsed, never evaluated
        ({"value": "Voss", "aliases": ["V.", "Voss"], "type": "x"}, ("Voss", "V.")),
        ([["x", None], [], [["y"]]], ("x", "y")),
        ([12, 1.5, True, float("nan")], ("12", "1.5", "yes")),
        ("Lena<|answer_split|> L. ", ("Lena", "L.")),
        (["AT&amp;T", "AT&T"], ("AT&T",)),
    ],
)
def test_answer_shapes(raw: object, expected: tuple[str, ...]) -> None:
    assert clean_answers(raw) == (expected, (), None)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (None, "empty_answers"),
        ([], "empty_answers"),
        ([" ", "\u200b"], "empty_answers"),
        ({"other": "x"}, "empty_answers"),
        (object(), "empty_answers"),
        (["*", "the"], "answer_normalises_to_empty"),
    ],
)
def test_no_usable_answer(raw: object, reason: str) -> None:
    assert clean_answers(raw)[2] == reason


def test_country_code_goes_unless_the_question_is_yes_no() -> None:
    assert clean_answers(["Norway", "NO", "no."])[:2] == (("Norway",), ("yes_no_alias_dropped",))
    assert clean_answers(["No", "no way"])[:2] == (("No", "no way"), ())
    assert clean_answers(["Yes", "no"])[:2] == (("Yes", "no"), ())
    assert clean_answers(["Bingo", "Yes"])[:2] == (("Bingo", "Yes"), ())


def test_published_answers_keep_every_text() -> None:
    raw = ["Norway", "NO", "", " *", "H&amp;W"]
    assert published_answers(raw) == (tuple(raw), (), None)
    assert published_answers(["", " "])[2] == "empty_answers"
    assert published_answers("['a']")[0] == ("['a']",)


def row(question: str = "who?", answers: object = ("x",), **other: object) -> RawRow:
    return RawRow("f.jsonl", 3, "q1", "nq", "train", question, answers, **other)  # type: ignore[arg-type]


@pytest.mark.parametrize("rule", ["full", "malformed"])
def test_a_row_that_nothing_could_write_is_removed(rule: Rule) -> None:
    broken = clean_row(row("who \ud83d?", ["x"]), rule)  # half of a surrogate pair
    assert isinstance(broken, Removal)
    assert (broken.reason, broken.line, broken.id) == ("bad_unicode", 3, "q1")


def test_answers_nested_beyond_reason_cost_one_row() -> None:
    nested: object = "x"
    for _ in range(5000):
        nested = [nested]
    removal = clean_row(row(answers=nested), "full")
    assert isinstance(removal, Removal)
    assert removal.reason == "answers_nested_too_deep"


def test_what_the_source_knows_is_kept() -> None:
    raw = row("who", ["yes"], support_ids=("p1",), family="2hop", num_hops=2)
    kept = clean_row(raw, "full")
    assert isinstance(kept, Candidate)
    question = kept.question
    assert (question.support_ids, question.family, question.num_hops) == (("p1",), "2hop", 2)
    assert question.answer_type == "yes_no"
    assert kept.key == "who"
