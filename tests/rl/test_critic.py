"""The judge behind HTTP: a lost endpoint is an error, a live one without a verdict is not."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moopd.config import ConfigError, CriticConfig
from moopd.rl.critic import HttpJudge, JudgeError, ReportToJudge, judge_address
from moopd.roles.prompts import Prompts
from moopd.types import Judgement, Passage
from tests.rl.fake_judge import FakeJudge, Reply, user_text

GOOD = "<score> 1 </score> <hint> fine </hint>"


def report(number: int = 0) -> ReportToJudge:
    return ReportToJudge("who a", "what b", f"red {number}", (Passage("p", "title", "harbor"),))


@contextmanager
def judge_at(url: str, **changes: Any) -> Iterator[HttpJudge]:
    config = CriticConfig(kind="http", url=url, model="m", **{"max_tries": 3, **changes})
    judge = HttpJudge(config, Prompts("compact"), backoff_s=0.001)
    yield judge
    judge.close()


@contextmanager
def judged_by(reply: Reply, **changes: Any) -> Iterator[tuple[HttpJudge, FakeJudge]]:
    with FakeJudge(reply) as fake, judge_at(fake.url, **changes) as judge:
        yield judge, fake


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_the_judge_sees_the_report_and_its_passages() -> None:
    with judged_by(lambda *_: GOOD) as (judge, fake):
        assert judge.judge([report()]) == [Judgement(1, "fine")]
    (body,) = fake.bodies
    assert (body["model"], body["temperature"]) == ("m", 0.0)
    shown = user_text(body)
    assert all(text in shown for text in ("who a", "what b", "red 0", "harbor"))


def test_an_endpoint_that_refuses_connections_is_an_error_that_says_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    message = rf"{url}/v1/chat/completions gave no answer in 3 tries.*ConnectError.*critic\.url"
    with judge_at(url) as judge, pytest.raises(JudgeError, match=message):
        judge.judge([report()])


def test_an_endpoint_that_hangs_is_an_error() -> None:
    def slow(number: int, body: dict[str, Any]) -> str:
        time.sleep(0.4)
        return GOOD

    with (
        judged_by(slow, timeout_s=0.05, max_tries=2) as (judge, _),
        pytest.raises(JudgeError, match=r"no answer in 2 tries.*ReadTimeout"),
    ):
        judge.judge([report()])


@pytest.mark.parametrize("bad", [(500, b"down"), (429, b""), (200, b"<html>"), (200, b"{}")])
def test_what_may_pass_is_asked_again(bad: tuple[int, bytes]) -> None:
    with judged_by(lambda number, _: bad if number < 3 else GOOD) as (judge, fake):
        assert judge.judge([report()]) == [Judgement(1, "fine")]
    # The same request each time: a lost answer is no malformed verdict.
    assert [body["temperature"] for body in fake.bodies] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("status", "content", "tries", "message"),
    [
        (503, b"no room", 3, "in 3 tries; the last one: status 503: no room"),
        (400, b"context too long", 1, "refused the request: status 400: context too long"),
        (401, b"", 1, "status 401"),
        (404, b"no model m", 1, r"status 404: no model m.*critic\.model"),
        (200, b"<html>", 3, "status 200 with a body that is no JSON"),
        (200, b'{"error": "x"}', 3, "a body that is no chat completion: {'error': 'x'}"),
        (200, b'"<score> 1 </score>"', 3, "no chat completion"),
        (200, b'{"choices": []}', 3, "no chat completion"),
        (200, b'{"choices": [{"message": null}]}', 3, "no chat completion"),
    ],
)
def test_a_lasting_failure_names_its_cause(
    status: int, content: bytes, tries: int, message: str
) -> None:
    with judged_by(lambda *_: (status, content)) as (judge, fake):
        with pytest.raises(JudgeError, match=message):
            judge.judge([report()])
        assert len(fake.bodies) == tries


def test_a_malformed_verdict_is_asked_again_and_the_third_one_counts() -> None:
    replies = ["fine", "<score> 1", GOOD]
    with judged_by(lambda number, _: replies[number - 1]) as (judge, fake):
        assert judge.judge([report()]) == [Judgement(1, "fine")]
    assert [body["temperature"] for body in fake.bodies] == [0.0, 0.7, 0.7]


@pytest.mark.parametrize("text", ["", "yes", "<score> 2 </score>", "<score> 0.5 </score>"])
def test_a_live_endpoint_without_a_verdict_leaves_none(text: str) -> None:
    with judged_by(lambda *_: text, max_retries=1) as (judge, fake):
        assert judge.judge([report()]) == [None]
        assert len(fake.bodies) == 2


def test_a_model_that_used_its_tokens_up_thinking_gave_no_verdict() -> None:
    content = json.dumps({"choices": [{"message": {"content": None}}]}).encode()
    with judged_by(lambda *_: (200, content), max_retries=0) as (judge, _):
        assert judge.judge([report()]) == [None]


def test_reports_are_judged_side_by_side_within_the_bound_and_stay_in_order() -> None:
    lock, running, highest = threading.Lock(), 0, 0
    together = threading.Barrier(3, timeout=30)

    def reply(number: int, body: dict[str, Any]) -> str:
        nonlocal running, highest
        with lock:
            running += 1
            highest = max(highest, running)
        if number <= together.parties:
            together.wait()
        place = int(user_text(body).split()[-1])
        time.sleep(0.01 if place % 2 else 0.03)
        with lock:
            running -= 1
        return f"<score> {place % 2} </score> <hint> {place} </hint>"

    with judged_by(reply, max_concurrent=3) as (judge, fake):
        found = judge.judge([report(place) for place in range(9)])
    assert found == [Judgement(place % 2, str(place)) for place in range(9)]
    assert (highest, len(fake.bodies)) == (3, 9)


def test_one_lost_report_is_the_error_of_the_call_and_the_judge_recovers() -> None:
    down = True

    def reply(number: int, body: dict[str, Any]) -> str | tuple[int, bytes]:
        return (500, b"down") if down and user_text(body).endswith("red 1") else GOOD

    with judged_by(reply) as (judge, _):
        with pytest.raises(JudgeError, match="status 500"):
            judge.judge([report(0), report(1), report(2)])
        down = False
        assert judge.judge([report(1)]) == [Judgement(1, "fine")]


def test_half_a_surrogate_pair_in_a_report_reaches_the_judge() -> None:
    odd = ReportToJudge("who", "what", "red \ud800", ())
    with judged_by(lambda *_: GOOD) as (judge, _):
        assert judge.judge([odd]) == [Judgement(1, "fine")]


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with judged_by(lambda *_: GOOD, max_tries=1) as (judge, _):
        assert judge.judge([report()]) == [Judgement(1, "fine")]


def test_the_url_may_end_in_v1_and_must_be_one() -> None:
    for url in ("http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"):
        config = CriticConfig(kind="http", url=url)
        assert str(judge_address(config, "models")) == "http://host:1/v1/models"
    for wrong, message in ((None, "is empty"), ("host:1", "expected http://HOST:PORT")):
        with pytest.raises(ConfigError, match=message):
            judge_address(CriticConfig(kind="http", url=wrong), "models")
