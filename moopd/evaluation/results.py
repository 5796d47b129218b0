"""What an evaluation found: one frozen tree that is report.json and feeds every page and figure.

Scores, differences and shares are percentages; workload is per workflow.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from moopd.systems import Reported

RESULTS_VERSION = 1


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Estimate(_Frozen):
    """A value with its percentile interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


class BySet(_Frozen):
    """One estimate per set and their equal-weight mean."""

    sets: dict[str, Estimate]
    macro: Estimate


class RunProvenance(_Frozen):
    """Where the records of one run came from: sha256 digests, empty where unknown."""

    records: str = ""
    checkpoint: str = ""
    step: int | None = None
    protocol: str = ""


class Provenance(_Frozen):
    """Digests of what all systems share, and of each run."""

    config: str = ""
    manifest: str = ""
    questions: str = ""
    index: str = ""
    code: str = ""
    runs: dict[str, RunProvenance] = {}
    """`system/run` -> its own."""


class Breakdown(_Frozen):
    """avg@4 of a group of questions, all counted once."""

    kind: str
    group: str
    num_questions: int
    avg: Estimate


class FunnelCounts(_Frozen):
    """Workflows by place (evaluation.funnel.Place); yes/no questions apart."""

    span: dict[str, int]
    yes_no: dict[str, int]


class BudgetPoint(_Frozen):
    budget: int
    share: Estimate


class SystemResult(_Frozen):
    """Everything about one row; `strict` and `flexible` hold avg, pass, all, maj."""

    name: str
    title: str
    workflow: str
    checkpoint: str
    runs: tuple[int, ...]
    num_records: int
    strict: dict[str, BySet]
    flexible: dict[str, BySet]
    run_avg: dict[str, float]
    """Macro avg@4 of every run."""
    run_spread: float | None
    """Unbiased standard deviation of `run_avg`; None for one run."""
    over_runs: Estimate | None
    """Macro avg@4 under the hierarchical bootstrap; None for one run."""
    workload: dict[str, BySet]
    shares: dict[str, float]
    histogram: tuple[int, ...]
    agreement: Estimate
    failures: dict[str, int]
    funnel: FunnelCounts | None
    budgets: dict[str, tuple[BudgetPoint, ...]]
    breakdown: tuple[Breakdown, ...]
    reported: Reported
    notes: tuple[str, ...]


class Difference(_Frozen):
    """`first` minus `second`, paired on the same questions and draws."""

    first: str
    second: str
    metric: str
    group: str
    """main, ablation (both at the fixed last step) or other."""
    sets: dict[str, Estimate]
    macro: Estimate
    num_wins: int
    over_runs: Estimate | None
    reported: Estimate | None

    @property
    def survives_runs(self) -> bool | None:
        """Whether the hierarchical interval leaves zero out as well; None for single runs."""
        return None if self.over_runs is None else self.over_runs.excludes_zero


class CompletionBound(_Frozen):
    """Reference minus `other` if every format failure of `other` were right: an assumption."""

    reference: str
    other: str
    num_failures: int
    completed_avg: float
    difference: Estimate


class CurvePoint(_Frozen):
    system: str
    run: int
    step: int
    metric: str
    value: float


class Choice(_Frozen):
    """One line of the protocol: what was used and, where the paper says, what it used."""

    item: str
    used: str
    paper: str = ""


class CasePassage(_Frozen):
    title: str
    text: str


class CaseSearch(_Frozen):
    query: str
    passages: tuple[str, ...]
    error: str | None = None


class CaseReport(_Frozen):
    id: int
    text: str
    selected: bool


class CaseSubtask(_Frozen):
    text: str
    searches: tuple[CaseSearch, ...]
    reports: tuple[CaseReport, ...]


class CaseRound(_Frozen):
    number: int
    subtasks: tuple[CaseSubtask, ...]


class CaseAttempt(_Frozen):
    answer: str | None
    output: str
    correct: bool
    stop: str
    place: str
    rounds: tuple[CaseRound, ...]


class Case(_Frozen):
    question_id: str
    dataset: str
    question: str
    answers: tuple[str, ...]
    attempts: dict[str, tuple[CaseAttempt, ...]]
    """By system."""


class CaseBook(_Frozen):
    """Questions of the case viewer and the rule that chose them; passages by id, stored once."""

    rule: str
    cases: tuple[Case, ...] = ()
    passages: dict[str, CasePassage] = {}


class Results(_Frozen):
    version: int = RESULTS_VERSION
    scale: str
    description: str
    caution: str
    reference: str
    num_attempts: int
    num_draws: int
    confidence: float
    seed: int
    sets: dict[str, int]
    systems: tuple[SystemResult, ...]
    differences: tuple[Difference, ...]
    completion: tuple[CompletionBound, ...]
    curves: tuple[CurvePoint, ...]
    cases: CaseBook
    deviations: tuple[Choice, ...]
    open_choices: tuple[Choice, ...]
    readings: tuple[str, ...]
    limits: tuple[str, ...]
    provenance: Provenance

    def system(self, name: str) -> SystemResult:
        """Raises KeyError naming the known systems."""
        for system in self.systems:
            if system.name == name:
                return system
        raise KeyError(f"no system {name!r}; known: {', '.join(s.name for s in self.systems)}")

    def title(self, name: str) -> str:
        return self.system(name).title

    def differences_of(self, metric: str, group: str | None = None) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if d.metric == metric and group in (None, d.group))

    def to_json(self) -> str:
        """Sorted keys, no NaN: the same results give the same bytes."""
        tree = self.model_dump(mode="json")
        return json.dumps(tree, ensure_ascii=False, sort_keys=True, indent=1, allow_nan=False)

    def metrics(self, name: str) -> dict[str, float]:
        """Flat numbers of one system for a tracker: avg_at_4/nq ... avg_at_4/macro."""
        system = self.system(name)
        flat = {}
        for metric, key in (("avg", "avg_at"), ("pass", "pass_at"), ("all", "all"), ("maj", "maj")):
            scores = system.strict[metric]
            for place, estimate in (*scores.sets.items(), ("macro", scores.macro)):
                flat[f"{key}_{self.num_attempts}/{place}"] = estimate.value
        flat |= {f"workload/{key}": value.macro.value for key, value in system.workload.items()}
        return flat | {f"share/{key}": value for key, value in system.shares.items()}


def read_results(path: Path) -> Results:
    """The Results of a report.json. Raises pydantic's ValidationError where it is none."""
    return Results.model_validate_json(path.read_text(encoding="utf-8"))
