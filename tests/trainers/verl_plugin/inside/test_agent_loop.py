"""The agent loop against a server client that is no server: one output per completion."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moopd.config import CriticConfig
from moopd.engines.base import EngineError
from moopd.trainers.verl_plugin.credit import check_workflows
from moopd.trainers.verl_plugin.spec import VerlRun
from tests.rl.fake_judge import FakeJudge
from tests.support import QUESTION, REPORT, SEARCH, answer, word_tokenizer
from tests.trainers.verl_plugin import scene
from tests.trainers.verl_plugin.test_rows_and_credit import run_of

TOKENIZER = word_tokenizer()


class Client:
    """What verl's server client gives back for `reply(prompt text)`."""

    def __init__(self, reply: Callable[[str], str]) -> None:
        self.reply = reply
        self.seen: list[dict[str, Any]] = []

    async def generate(self, request_id: str, **call: Any) -> Any:
        await asyncio.sleep(0)
        self.seen.append({"request_id": request_id, **call})
        text = self.reply(TOKENIZER.decode(call["prompt_ids"]))
        ids = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        return SimpleNamespace(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            stop_reason="completed",
            extra_fields={"min_global_steps": 3, "max_global_steps": 4},
        )


@pytest.fixture
def run(tmp_path: Path) -> Iterator[VerlRun]:
    from moopd.trainers.verl_plugin import agent_loop

    agent_loop._shared.cache_clear()
    with scene.retrieval_server() as url:
        made = run_of("cmas_rl").model_copy(
            update={"work": str(tmp_path), "retrieval_url": url, "call_timeout_s": 5.0}
        )
        made.write()
        yield made
    agent_loop._shared.cache_clear()


def act(prompt: str) -> str:
    if "answerer" in prompt:
        return answer("x")
    return REPORT if "red harbor" in prompt else SEARCH


def outputs(run: VerlRun, client: Client, split: str = "train") -> list[Any]:
    from moopd.trainers.verl_plugin.agent_loop import WorkflowLoop

    rollout = SimpleNamespace(name="transformers_cpu")
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(
            moopd=SimpleNamespace(run_file=run.folder / "run.json"), rollout=rollout
        )
    )
    loop = WorkflowLoop(SimpleNamespace(config=config), client, TOKENIZER)
    info = {"split": split, "index": 4, "number": 1, "question": json.dumps(asdict(QUESTION))}
    row = {"extra_info": info, "uid": "u7", "global_steps": 5, "session_id": 1}
    params = {"top_k": -1, "repetition_penalty": 1.0}
    found: list[Any] = asyncio.run(loop.run(params, **row))
    return found


def test_one_output_per_completion_with_owner_and_reward(run: VerlRun) -> None:
    client = Client(act)
    found = outputs(run, client)
    metas = [output.extra_fields["moopd"] for output in found]
    roles = [(meta["role"], meta["call"], meta["candidate"]) for meta in metas]
    assert roles[-2:] == [("answerer", metas[-1]["call"], 0), ("answerer", metas[-1]["call"], 1)]
    assert {role for role, _, _ in roles[:-2]} == {"searcher"}
    # Right answer (1.0), one search and a report: 0.9 + 0.1 * 0.5 = 0.95.
    credit = metas[0]["workflow"]["credit"]
    assert credit["searcher"] == pytest.approx(0.95)
    assert (metas[0]["workflow"]["question"], metas[0]["workflow"]["member"]) == ("u7", 1)
    for output in found:
        assert output.reward_score == 1.0
        assert output.response_mask == [1] * len(output.response_ids)
        assert len(output.response_logprobs) == len(output.response_ids)
        assert output.extra_fields["min_global_steps"] == 3
        assert set(output.extra_fields) == set(found[0].extra_fields)
    assert (run.folder / "loaded" / "agent_loop.json").is_file()


def test_candidates_are_calls_of_one_session_with_seeds_of_their_own(run: VerlRun) -> None:
    client = Client(act)
    outputs(run, client)
    assert len({call["request_id"] for call in client.seen}) == 1
    seeds = [call["sampling_params"]["seed"] for call in client.seen]
    assert len(set(seeds)) == len(seeds)
    assert client.seen[0]["sampling_params"]["max_tokens"] == run.workflow.max_output_tokens
    assert client.seen[0]["sampling_params"]["temperature"] == 1.0


def test_development_asks_one_candidate_at_evaluation_sampling(run: VerlRun) -> None:
    client = Client(act)
    found = outputs(run, client, split="dev")
    assert [o.extra_fields["moopd"]["role"] for o in found].count("answerer") == 1
    assert client.seen[0]["sampling_params"]["temperature"] == 0.6
    assert found[0].extra_fields["reward_extra_info"]["em"] == 1.0


def test_a_dead_server_is_an_output_and_no_exception(run: VerlRun) -> None:
    def dead(_: str) -> str:
        raise ConnectionError("server gone")

    (only,) = outputs(run, Client(dead))
    assert only.extra_fields["moopd"]["workflow"]["error"] == "ConnectionError: server gone"
    assert only.response_mask == [0]
    assert only.extra_fields["reward_extra_info"]["error"] == "ConnectionError: server gone"


def judged(run: VerlRun, judge: FakeJudge) -> list[Any]:
    from moopd.trainers.verl_plugin import agent_loop

    critic = CriticConfig(kind="http", url=judge.url, max_tries=1, max_retries=1)
    system = scene.system("prompted_critic")
    run.model_copy(update={"system": system, "critic": critic}).write()
    agent_loop._shared.cache_clear()
    found = outputs(run, Client(act_as_team))
    return [output.extra_fields["moopd"]["workflow"] for output in found]


def act_as_team(prompt: str) -> str:
    if "answerer" in prompt:
        return answer("x")
    if "leader" in prompt:
        return "<select> 1 </select>" if "report" in prompt else "<task> who a </task>"
    return REPORT if "red harbor" in prompt else SEARCH


def test_a_verdict_is_the_reward_of_its_report(run: VerlRun) -> None:
    for text, reward in (("<score> 1 </score>", 1.0), ("<score> 0 </score>", 0.0), ("so", None)):
        with FakeJudge(lambda *_, text=text: text) as judge:
            workflows = judged(run, judge)
        assert workflows[0]["error"] is None
        assert workflows[0]["credit"]["subtasks"] == (reward,)
        assert workflows[0]["verdicts"] == [[0, reward]]
        assert len(judge.bodies) == (2 if reward is None else 1)


def test_a_judge_that_is_gone_is_an_output_with_its_cause(run: VerlRun) -> None:
    with FakeJudge(lambda *_: (503, b"no room")) as judge:
        workflows = judged(run, judge)
    assert len(workflows) > 1
    for workflow in workflows:
        assert workflow["credit"] is None
        assert "JudgeError" in workflow["error"] and "status 503: no room" in workflow["error"]
    with pytest.raises(EngineError, match=r"1 of 1 workflows.*no room.*start the stage again"):
        check_workflows(workflows[:1], 0.0)


def test_a_hanging_server_ends_at_the_time_limit(run: VerlRun) -> None:
    class Hanging(Client):
        async def generate(self, request_id: str, **call: Any) -> Any:
            await asyncio.sleep(60)

    from moopd.trainers.verl_plugin import agent_loop

    run.model_copy(update={"call_timeout_s": 0.2}).write()
    agent_loop._shared.cache_clear()
    (only,) = outputs(run, Hanging(act))
    assert only.extra_fields["moopd"]["workflow"]["error"].startswith("TimeoutError")


def test_a_fault_of_ours_is_an_output_with_its_traceback(
    run: VerlRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moopd.trainers.verl_plugin import agent_loop

    monkeypatch.setattr(agent_loop, "rows_of", lambda *_: 1 / 0)
    (only,) = outputs(run, Client(act))
    assert "ZeroDivisionError" in only.extra_fields["moopd"]["workflow"]["error"]


def test_an_over_long_prompt_ends_the_workflow_and_is_never_cut(run: VerlRun) -> None:
    from moopd.trainers.verl_plugin import agent_loop

    workflow = run.workflow.model_copy(update={"max_input_tokens": 3})
    run.model_copy(update={"workflow": workflow}).write()
    agent_loop._shared.cache_clear()
    client = Client(act)
    (only,) = outputs(run, client)
    assert client.seen == []
    assert only.extra_fields["moopd"]["call"] == -1
    assert only.extra_fields["moopd"]["workflow"]["error"] is None
    assert only.extra_fields["min_global_steps"] == 4
