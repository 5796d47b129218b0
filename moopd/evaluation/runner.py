"""Runs the attempts of one system and keeps a record of each (sections 4 and B.2)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from moopd.config import EvaluationConfig, WorkflowConfig
from moopd.engines.base import Engine
from moopd.evaluation.attempts import arrange, question_set
from moopd.evaluation.journal import Journal, Key
from moopd.evaluation.records import canonical_json, read_table, to_table, write_records
from moopd.retrieval.base import RetrievalError, Retriever
from moopd.roles.prompts import Prompts
from moopd.roles.render import Renderer
from moopd.types import EvalRecord, FormatError, Question, Role, Trajectory
from moopd.workflows.rollout import Job, Team, derive_seed, run_workflows

RECORDS = "records.parquet"
JOURNAL = "records.journal.jsonl"
_EVALUATION = 2
"""Marks the evaluation branch of the seed tree; 0 and 1 are training and validation."""
_MIN_RETRIEVALS = 20
"""Before so many retrievals their failed share decides nothing."""


@dataclass(frozen=True)
class EvaluationTask:
    """What is evaluated: one row of the tables on the test questions."""

    system: str
    workflow: Literal["cascade", "hierarchy"]
    questions: Sequence[Question]
    evaluation: EvaluationConfig
    limits: WorkflowConfig
    top_k: int
    protocol: str
    """Digest from `protocol_digest`."""
    seed: int = 0
    run: int = 0
    max_retrieval_error_share: float = 0.01


def protocol_digest(
    evaluation: EvaluationConfig, limits: WorkflowConfig, manifest: str, checkpoint: str
) -> str:
    """sha256 over what makes records comparable; the number of live workflows does not matter."""
    sampling = evaluation.model_dump(mode="json", exclude={"max_live_workflows"})
    tree = [sampling, limits.model_dump(mode="json"), manifest, checkpoint]
    return hashlib.sha256(canonical_json(tree).encode()).hexdigest()


def evaluate(
    task: EvaluationTask,
    engine: Engine,
    retriever: Retriever,
    renderer: Renderer,
    prompts: Prompts,
    folder: Path,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Run or resume all attempts; returns the parquet file of the complete, checked records.

    Finished workflows are journalled one by one, so a crash costs only those under way. Raises
    RetrievalError when too many retrievals fail; those workflows run again next time.
    """
    team = Team(
        workflow=task.workflow,
        config=task.limits,
        prompts=prompts,
        renderer=renderer,
        sampling=task.evaluation.sampling,
        num_candidates=1,
        top_k=task.top_k,
    )
    total = len(task.questions) * task.evaluation.attempts
    with Journal(folder / JOURNAL, task.protocol) as journal:
        jobs = _open_jobs(task, journal)
        watch = _RetrievalWatch(task.max_retrieval_error_share)

        def keep(job: Job, trajectory: Trajectory) -> None:
            journal.append(record_of(trajectory, task, job.seed))
            watch.see(trajectory)
            if progress is not None:
                progress(len(journal.finished), total)

        try:
            run_workflows(jobs, team, engine, retriever, task.evaluation.max_live_workflows, keep)
            watch.check(final=True)
        except RetrievalError:
            journal.forget(_failed_retrievals(journal))
            raise
        records = list(journal.finished.values())
    arrange(to_table(records), question_set(task.questions), task.evaluation.attempts)
    write_records(folder / RECORDS, records)
    read_table(folder / RECORDS)
    return folder / RECORDS


def attempt_seed(seed: int, question_id: str, attempt: int) -> int:
    """A seed of its own for every attempt, whatever the order or number of the questions."""
    word = int.from_bytes(hashlib.sha256(question_id.encode()).digest()[:8], "little")
    return derive_seed(seed, _EVALUATION, word, attempt)


def record_of(trajectory: Trajectory, task: EvaluationTask, seed: int) -> EvalRecord:
    """The row of one finished workflow; tokens are summed over turns (section A.3)."""
    answerer = [call for call in trajectory.calls if call.role is Role.ANSWERER]
    return EvalRecord(
        system=task.system,
        run=task.run,
        question_id=trajectory.question.id,
        dataset=trajectory.question.dataset,
        attempt=trajectory.group_index,
        output=answerer[-1].completions[0].text if answerer else "",
        stop=trajectory.stop.value,
        num_searches=trajectory.num_searches,
        num_repeated_queries=trajectory.num_repeated_queries,
        num_subtasks=len(trajectory.subtasks),
        num_reports=len(trajectory.reports),
        num_rounds=trajectory.num_rounds,
        num_steps=trajectory.num_steps,
        num_calls=len(trajectory.calls),
        input_tokens=trajectory.input_tokens,
        output_tokens=trajectory.output_tokens,
        format_failures=_format_failures(trajectory),
        seed=seed,
        protocol=task.protocol,
        trace=_trace(trajectory),
    )


def _open_jobs(task: EvaluationTask, journal: Journal) -> list[Job]:
    return [
        Job(question, attempt, attempt_seed(task.seed, question.id, attempt))
        for question in task.questions
        for attempt in range(task.evaluation.attempts)
        if (question.id, attempt) not in journal.finished
    ]


def _format_failures(trajectory: Trajectory) -> dict[str, int]:
    found = Counter(
        f"{call.role.value}/{action.kind.value}"
        for call in trajectory.calls
        for action in call.actions
        if isinstance(action, FormatError)
    )
    return dict(sorted(found.items()))


def _trace(trajectory: Trajectory) -> dict[str, object]:
    return {
        "subtasks": [asdict(subtask) for subtask in trajectory.subtasks],
        "retrievals": [asdict(retrieval) for retrieval in trajectory.retrievals],
        "reports": [asdict(report) for report in trajectory.reports],
        "selected": list(trajectory.selected),
        "unknown_report_ids": trajectory.num_unknown_report_ids,
        "cut_passages": trajectory.num_cut_passages,
    }


class _RetrievalWatch:
    """Counts failed retrievals, so that a dead retriever does not cost a whole evaluation."""

    def __init__(self, max_share: float) -> None:
        self._max_share = max_share
        self._num_failed = 0
        self._num_seen = 0
        self._cause = ""

    def see(self, trajectory: Trajectory) -> None:
        for retrieval in trajectory.retrievals:
            self._num_seen += 1
            if retrieval.error is not None:
                self._num_failed += 1
                self._cause = self._cause or retrieval.error
        self.check()

    def check(self, *, final: bool = False) -> None:
        if self._num_seen < _MIN_RETRIEVALS and not final:
            return
        if self._num_failed > self._max_share * self._num_seen:
            raise RetrievalError(
                f"{self._num_failed} of {self._num_seen} retrievals failed, at most "
                f"{self._max_share:.1%} may; first cause: {self._cause}"
            )


def _failed_retrievals(journal: Journal) -> set[Key]:
    failed = set()
    for key, record in journal.finished.items():
        retrievals = record.trace["retrievals"]
        assert isinstance(retrievals, list)
        if any(retrieval["error"] is not None for retrieval in retrievals):
            failed.add(key)
    return failed
