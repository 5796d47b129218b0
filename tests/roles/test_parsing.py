"""Rules: exact lower-case tags; one action a turn; the Answerer's last complete tag counts."""

from __future__ import annotations

import pytest

from moopd.roles.parsing import neutralise, parse
from moopd.types import (
    Action,
    Delegate,
    FormatError,
    FormatErrorKind,
    GiveAnswer,
    Judgement,
    Role,
    Search,
    SelectReports,
    WriteReport,
)

K = FormatErrorKind


def bad(kind: FormatErrorKind) -> FormatError:
    return FormatError(kind)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<search>red harbor</search>", Search("red harbor")),
        ("I look. <search> red </search> done", Search("red")),
        ("<report>Key Findings: x</report>", WriteReport("Key Findings: x")),
        ("red harbor", bad(K.NO_ACTION)),
        ("<search>red", bad(K.UNCLOSED)),
        ("red</search>", bad(K.UNCLOSED)),
        ("<search>red</report>", bad(K.UNCLOSED)),
        ("<search>a<search>b</search></search>", bad(K.UNCLOSED)),
        ("<SEARCH>red</SEARCH>", bad(K.NO_ACTION)),
        ("<search> </search>", bad(K.EMPTY)),
        ("<search>a</search><search>b</search>", bad(K.SEVERAL_ACTIONS)),
        ("<search>a</search><report>b</report>", bad(K.SEVERAL_ACTIONS)),
        ("<search>a</search><answer>b</answer>", bad(K.WRONG_ROLE)),
        ("<answer>b</answer>", bad(K.WRONG_ROLE)),
        ("<think><search>a</search></think><search>b</search>", Search("b")),
        ("<think><search>a</search>", bad(K.UNCLOSED)),
        ("<think>a</think><search>b</search><think>c</think>", Search("b")),
        ("<search>a</search><search>b", bad(K.UNCLOSED)),
    ],
)
def test_searcher(text: str, expected: Action) -> None:
    assert parse(Role.SEARCHER, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>x</answer>", GiveAnswer("x")),
        ("<answer>x</answer> and more text", GiveAnswer("x")),
        ("<answer>a</answer>" * 30 + "<answer>b</answer>", GiveAnswer("b")),
        ("<answer>a<answer>b</answer>", GiveAnswer("b")),
        ("<answer>a</answer><answer>b", GiveAnswer("a")),
        ("<answer>a</answer> b</answer>", GiveAnswer("a")),
        ("<answer>x", bad(K.UNCLOSED)),
        ("x</answer>", bad(K.NO_ACTION)),
        ("<answer>  </answer>", bad(K.EMPTY)),
        ("<ANSWER>x</ANSWER>", bad(K.NO_ACTION)),
        ("<think><answer>a</answer></think>", bad(K.NO_ACTION)),
        ("x", bad(K.NO_ACTION)),
        ("<answer>" + "x " * 5000 + "</answer>", GiveAnswer(("x " * 5000).strip())),
    ],
)
def test_answerer(text: str, expected: Action) -> None:
    assert parse(Role.ANSWERER, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<task>a b</task>", Delegate(("a b",))),
        ("<task>a</task> <task>b</task>", Delegate(("a", "b"))),
        ("<select>1, 3</select>", SelectReports((1, 3))),
        ("<select>2 2 1</select>", SelectReports((2, 1))),
        ("<select></select>", SelectReports(())),
        ("<select>none</select>", SelectReports(())),
        ("<select>first</select>", bad(K.EMPTY)),
        ("<select>1</select><select>2</select>", bad(K.SEVERAL_ACTIONS)),
        ("<task>a</task><select>1</select>", bad(K.SEVERAL_ACTIONS)),
        ("<task>a</task><task> </task>", bad(K.EMPTY)),
        ("<search>a</search>", bad(K.WRONG_ROLE)),
    ],
)
def test_leader(text: str, expected: Action) -> None:
    assert parse(Role.LEADER, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<score>1</score><hint>good</hint>", Judgement(1, "good")),
        ("<score>0</score>", Judgement(0, "")),
        ("<score>2</score>", bad(K.EMPTY)),
        ("<score>0.5</score>", bad(K.EMPTY)),
        ("<hint>good</hint>", bad(K.NO_ACTION)),
        ("<score>1</score><score>0</score>", bad(K.SEVERAL_ACTIONS)),
        ("<score>1</score><hint>a</hint><hint>b</hint>", bad(K.SEVERAL_ACTIONS)),
    ],
)
def test_critic(text: str, expected: Action) -> None:
    assert parse(Role.CRITIC, text) == expected


def test_a_cut_completion_is_named_so_unless_its_action_is_whole() -> None:
    assert parse(Role.SEARCHER, "<search>red", cut=True) == bad(K.CUT)
    assert parse(Role.SEARCHER, "<search>red</search> so", cut=True) == Search("red")


@pytest.mark.parametrize("tag", ["<search>", "</answer>", "<Select>", "</THINK>", "<report>"])
def test_tags_in_text_from_outside_lose_their_brackets(tag: str) -> None:
    assert neutralise(f"a {tag} b") == f"a ‹{tag[1:-1]}› b"
    assert neutralise("1 < 2 > 0 <b>") == "1 < 2 > 0 <b>"
