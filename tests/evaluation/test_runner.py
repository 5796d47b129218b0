"""Evaluation runs: seeds, records, crashes, a retriever that fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from moopd.config import EvaluationConfig, WorkflowConfig
from moopd.engines.base import EngineError
from moopd.evaluation.attempts import arrange, question_set
from moopd.evaluation.records import RecordsError, from_table, read_table
from moopd.evaluation.runner import (
    JOURNAL,
    EvaluationTask,
    attempt_seed,
    evaluate,
    protocol_digest,
)
from moopd.retrieval.base import RetrievalError
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.types import Completion, EvalRecord, GenerateRequest, Passage, Question
from tests.support import REPORT, SEARCH, OnePassage, Script, answer, word_tokenizer

QUESTIONS = [Question(f"q{k}", "nq", "who a", ("x",)) for k in range(5)]
TASK = EvaluationTask(
    system="cmas_base",
    workflow="cascade",
    questions=QUESTIONS,
    evaluation=EvaluationConfig(max_live_workflows=3),
    limits=WorkflowConfig(max_input_tokens=512, max_output_tokens=32),
    top_k=1,
    protocol="p",
    seed=7,
)
TOKENIZER = word_tokenizer()


def reply(prompt: str, _: int) -> str:
    if "red harbor" not in prompt and "<report>" not in prompt and not asks_answer(prompt):
        return SEARCH
    return answer() if asks_answer(prompt) else REPORT


def asks_answer(prompt: str) -> bool:
    return prompt.startswith(ANSWERER)


def engine() -> Script:
    return Script(TOKENIZER, reply)


ANSWERER = TOKENIZER.decode(
    Renderer(TOKENIZER).start(Prompts("compact").answerer("who a", [], []))
)[:12]


def run(task: EvaluationTask, engine: Script, folder: Path, retriever: object = None) -> Path:
    return evaluate(
        task,
        engine,
        retriever or OnePassage(),
        Renderer(TOKENIZER),
        Prompts("compact"),
        folder,  # type: ignore[arg-type]
    )


def records(path: Path) -> list[EvalRecord]:
    return from_table(read_table(path))


@dataclass
class Breaking(Script):
    calls_left: int = 10

    def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise EngineError("gone")
        return super().generate(requests)


def test_every_attempt_is_recorded_with_its_own_seed(tmp_path: Path) -> None:
    script = engine()
    found = records(run(TASK, script, tmp_path))
    assert {(r.question_id, r.attempt) for r in found} == {
        (q.id, k) for q in QUESTIONS for k in range(4)
    }
    assert len({r.seed for r in found}) == 20
    assert len({request.seed for request in script.seen}) == len(script.seen)
    one = found[0]
    assert (one.num_searches, one.num_calls, one.num_reports, one.stop) == (1, 3, 1, "answered")
    assert one.output == answer()
    retrieval = one.trace["retrievals"][0]  # type: ignore[index]
    assert retrieval["passages"][0]["text"] == "red harbor"
    assert one.input_tokens == sum(
        len(r.prompt_ids) for r in script.seen if r.seed in seeds_of(script, one)
    )


def seeds_of(script: Script, record: EvalRecord) -> set[int]:
    from moopd.workflows.rollout import derive_seed

    return {derive_seed(record.seed, call) for call in range(record.num_calls)}


def test_seeds_depend_on_question_attempt_and_seed_alone() -> None:
    assert attempt_seed(7, "q0", 1) == attempt_seed(7, "q0", 1)
    seeds = {attempt_seed(s, q, a) for s in (0, 1) for q in ("q0", "q1") for a in range(4)}
    assert len(seeds) == 16


def test_crash_in_the_middle_keeps_what_was_finished(tmp_path: Path) -> None:
    broken = Breaking(TOKENIZER, reply, calls_left=10)
    with pytest.raises(EngineError):
        run(TASK, broken, tmp_path)
    with (tmp_path / JOURNAL).open() as file:
        kept = len(file.readlines())
    assert 0 < kept < 20
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"system": "cmas_ba')  # the process died while writing
    again = engine()
    found = records(run(TASK, again, tmp_path))
    assert len(again.seen) == 3 * (20 - kept)
    assert found == records(run(TASK, engine(), tmp_path / "uninterrupted"))
    assert found == records(run(TASK, engine(), tmp_path))  # the cut line spoilt nothing


def test_finished_evaluation_runs_nothing(tmp_path: Path) -> None:
    first = run(TASK, engine(), tmp_path).read_bytes()
    script = engine()
    assert run(TASK, script, tmp_path).read_bytes() == first
    assert script.seen == []


def test_records_of_another_protocol_are_not_resumed(tmp_path: Path) -> None:
    run(TASK, engine(), tmp_path)
    with pytest.raises(RecordsError, match="written under protocol"):
        run(replace(TASK, protocol="q"), engine(), tmp_path)


def test_failing_retriever_stops_the_evaluation_and_is_run_again(tmp_path: Path) -> None:
    class Flaky(OnePassage):
        down = True

        def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
            if self.down:
                raise RetrievalError("server is down")
            return super().search(queries, top_k)

    def stubborn(prompt: str, _: int) -> str:
        if asks_answer(prompt):
            return answer()
        return SEARCH if prompt.count("<search>") < 2 else REPORT

    flaky = Flaky()
    with pytest.raises(RetrievalError, match=r"retrievals failed, at most 1\.0%.*server is down"):
        run(TASK, Script(TOKENIZER, stubborn), tmp_path, flaky)
    assert (tmp_path / JOURNAL).read_text() == ""
    flaky.down = False
    found = records(run(TASK, Script(TOKENIZER, stubborn), tmp_path, flaky))
    assert all(r["error"] is None for one in found for r in one.trace["retrievals"])  # type: ignore[attr-defined]
    arrange(read_table(tmp_path / "records.parquet"), question_set(QUESTIONS))


def test_protocol_digest_is_about_what_is_comparable() -> None:
    base = protocol_digest(EvaluationConfig(), WorkflowConfig(), "m", "c")
    live = EvaluationConfig(max_live_workflows=3)
    assert protocol_digest(live, WorkflowConfig(), "m", "c") == base
    assert protocol_digest(EvaluationConfig(attempts=2), WorkflowConfig(), "m", "c") != base
    assert protocol_digest(EvaluationConfig(), WorkflowConfig(leader_rounds=1), "m", "c") != base
    assert protocol_digest(EvaluationConfig(), WorkflowConfig(), "m2", "c") != base
    assert protocol_digest(EvaluationConfig(), WorkflowConfig(), "m", "c2") != base
