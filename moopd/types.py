"""Every record that crosses a module border: frozen, typed, no torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

DATASETS = ("nq", "triviaqa", "popqa", "hotpotqa", "2wiki", "musique", "bamboogle")
"""The seven evaluation sets, in the paper's order (section 4)."""


class Role(StrEnum):
    LEADER = "leader"
    SEARCHER = "searcher"
    ANSWERER = "answerer"
    CRITIC = "critic"


# ---------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class Question:
    """One question with its accepted answers (at least one, the main one first)."""

    id: str
    dataset: str
    text: str
    answers: tuple[str, ...]
    answer_type: Literal["span", "yes_no"] = "span"
    family: str = ""
    """Question family (synthetic world) or the source's own type (real sets); may be empty."""
    num_hops: int | None = None
    support_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Passage:
    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class ArtifactRef:
    """What travels between Prefect tasks: a path and the digest of what lies there."""

    kind: str
    path: str
    sha256: str


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """A transformers folder that nothing writes to any more; `sha256` is over its weights."""

    system: str
    step: int
    path: str
    sha256: str


# ---------------------------------------------------------------- workflow


@dataclass(frozen=True, slots=True)
class Message:
    speaker: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Ask:
    """What a workflow wants from the policy now.

    A conversation (one Leader, one Searcher of one subtask, one Answerer) grows by appending:
    `messages` holds only what is new since the conversation's last completion.
    """

    role: Role
    conversation: int
    messages: tuple[Message, ...]
    num_candidates: int
    step: int
    subtask: int | None = None


@dataclass(frozen=True, slots=True)
class Delegate:
    subtasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SelectReports:
    report_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Search:
    query: str


@dataclass(frozen=True, slots=True)
class WriteReport:
    text: str


@dataclass(frozen=True, slots=True)
class GiveAnswer:
    text: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """The critic's verdict on one report: score 1 adequate, 0 not; the hint is stored only."""

    score: int
    hint: str


class FormatErrorKind(StrEnum):
    """Why a completion is no action of its role (case list in tests/roles/test_parsing.py)."""

    NO_ACTION = "no_action"
    UNCLOSED = "unclosed"
    EMPTY = "empty"
    SEVERAL_ACTIONS = "several_actions"
    WRONG_ROLE = "wrong_role"
    CUT = "cut"
    ROUND_LIMIT = "round_limit"


@dataclass(frozen=True, slots=True)
class FormatError:
    kind: FormatErrorKind


Action = Delegate | SelectReports | Search | WriteReport | GiveAnswer | Judgement | FormatError


@dataclass(frozen=True, slots=True)
class Query:
    """One search a workflow wants run; `passages_of` of the delivery keeps this order."""

    conversation: int
    subtask: int
    text: str


@dataclass(frozen=True, slots=True)
class Subtask:
    id: int
    round: int
    text: str


@dataclass(frozen=True, slots=True)
class Retrieval:
    step: int
    subtask: int
    query: str
    passages: tuple[Passage, ...]
    error: str | None = None
    """Set when the retriever failed; never confused with "no passages found"."""


@dataclass(frozen=True, slots=True)
class Report:
    id: int
    subtask: int
    text: str


class StopReason(StrEnum):
    ANSWERED = "answered"
    STEP_BUDGET = "step_budget"
    CONTEXT = "context"


# ---------------------------------------------------------------- engine


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One engine call. `conversation_key` names a prefix that later calls will extend."""

    prompt_ids: tuple[int, ...]
    num_candidates: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    conversation_key: tuple[int, int] | None = None
    """(live workflow index, conversation): lets an engine keep the KV cache between turns."""


@dataclass(frozen=True, slots=True)
class Completion:
    """`token_ids` as sampled, end token included; `logprobs` of the sampling policy for each."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish: Literal["stop", "length"]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"completion has {len(self.token_ids)} tokens but {len(self.logprobs)} logprobs; "
                "an engine must return one logprob per sampled token"
            )


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Log-probabilities of `token_ids` after `prompt_ids` are wanted (teacher, reference)."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


# ---------------------------------------------------------------- record


@dataclass(frozen=True, slots=True)
class Call:
    """One engine request and what came of it; `actions[c]` belongs to `completions[c]`."""

    index: int
    role: Role
    conversation: int
    step: int
    subtask: int | None
    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    actions: tuple[Action, ...]
    seed: int = 0

    @property
    def valid(self) -> bool:
        return not any(isinstance(action, FormatError) for action in self.actions)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The record of one workflow: everything it did. A failed workflow is one too."""

    question: Question
    group_index: int
    workflow: Literal["cascade", "hierarchy"]
    calls: tuple[Call, ...]
    subtasks: tuple[Subtask, ...]
    retrievals: tuple[Retrieval, ...]
    reports: tuple[Report, ...]
    selected: tuple[int, ...]
    """Report ids that the Answerer saw."""
    stop: StopReason
    num_steps: int
    num_tool_steps: int
    """C_tool: environment steps with at least one valid search, parallel ones counted once."""
    num_rounds: int
    """Leader rounds that delegated; 0 in the cascade."""
    num_unknown_report_ids: int = 0
    num_cut_passages: int = 0

    @property
    def answers(self) -> tuple[str | None, ...]:
        """The candidates of the answering request; None where malformed; empty if none was made."""
        for call in reversed(self.calls):
            if call.role is Role.ANSWERER:
                return tuple(a.text if isinstance(a, GiveAnswer) else None for a in call.actions)
        return ()

    @property
    def num_searches(self) -> int:
        return len(self.retrievals)

    @property
    def num_repeated_queries(self) -> int:
        """Searches whose text an earlier search of the workflow had already."""
        return self.num_searches - len({retrieval.query for retrieval in self.retrievals})

    @property
    def input_tokens(self) -> int:
        """Prompt tokens summed over turns: history that is shown again counts again."""
        return sum(len(call.prompt_ids) for call in self.calls)

    @property
    def output_tokens(self) -> int:
        """Sampled tokens of all candidates of all turns."""
        return sum(len(c.token_ids) for call in self.calls for c in call.completions)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who a token belongs to, carried to the place where credit is decided."""

    question_id: str
    group_index: int
    call: int
    candidate: int
    role: Role


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """One completion with its credit. `advantages` (T,), `old_logprobs` (T,), one per `token_ids`.

    Only `token_ids` are trained; `prompt_ids` carry prompts, passages and received reports.
    """

    owner: Owner
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    old_logprobs: tuple[float, ...]
    advantages: tuple[float, ...]
    rollout_weights: tuple[float, ...] | None = None
    """Truncated importance weights min(pi_old / pi_rollout, cap), where the engine samples with
    other numerics than the trainer; None means 1."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.old_logprobs), len(self.advantages)}
        if len(lengths) != 1:
            raise ValueError(
                f"sample of {self.owner} has {len(self.token_ids)} tokens, "
                f"{len(self.old_logprobs)} old logprobs and {len(self.advantages)} advantages; "
                "all three must agree"
            )


# ---------------------------------------------------------------- evaluation


@dataclass(frozen=True, slots=True)
class EvalRecord:
    """One attempt of one system at one question: a row of the records file (docs/records.md)."""

    system: str
    question_id: str
    dataset: str
    attempt: int
    output: str
    """Raw text of the last Answerer output; empty when none was made."""
    stop: str
    num_searches: int
    num_repeated_queries: int
    num_subtasks: int
    num_reports: int
    num_rounds: int
    num_steps: int
    num_calls: int
    input_tokens: int
    output_tokens: int
    format_failures: dict[str, int] = field(default_factory=dict)
    """role/kind -> count, for example {"searcher/unclosed": 1}."""
    seed: int = 0
    protocol: str = ""
    """Digest of evaluation sampling, manifest and checkpoint; one file holds one per system."""
    trace: dict[str, object] = field(default_factory=dict)
    """subtasks, retrievals (query, passages), reports, selected: what funnel and viewer read."""
    run: int = 0
    """Training seed of the policy; several of one system give the spread between runs."""
