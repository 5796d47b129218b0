"""What several test files need: a word tokenizer, a tiny policy, a retriever and scripted teams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moopd.config import SamplingConfig, WorkflowConfig
from moopd.roles.prompts import Prompts, compact_words
from moopd.roles.render import Renderer
from moopd.types import (
    CheckpointRef,
    Completion,
    GenerateRequest,
    Passage,
    Question,
    ScoreRequest,
    Trajectory,
)
from moopd.workflows.rollout import Job, Team, run_workflows

WORDS = ("a", "b", "c", "d", "e", "x", "y", "z", "who", "what", "red", "blue", "harbor", "1", "2")

TAGS = ("task", "select", "search", "report", "answer", "score", "hint")
QUESTION = Question("q1", "nq", "who a", ("x",))


def word_tokenizer() -> Any:
    """A word-level tokenizer with a compact chat template; control tokens are added tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tags = [tag for name in TAGS for tag in (f"<{name}>", f"</{name}>")]
    words = dict.fromkeys(["<unk>", *tags, *compact_words(), *WORDS])
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        eos_token="[eos]",
        pad_token="[pad]",
        additional_special_tokens=["[user]", "[assistant]"],
    )
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} "
        "{% if m.role == 'assistant' %}[eos] {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    return tokenizer


def tiny_policy(tokenizer: Any, seed: int = 0, **shape: Any) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    small: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }
    return Qwen3ForCausalLM(Qwen3Config(**small | shape)).eval()


class OnePassage:
    """A retriever that always finds the same passage."""

    passage = Passage("p1", "title", "red harbor")

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        return [[self.passage] for _ in queries]


@dataclass
class Script:
    """An engine that says what `reply(prompt text, candidate)` returns; logprobs are -0.5 each."""

    tokenizer: Any
    reply: Callable[[str, int], str]
    seen: list[GenerateRequest] = field(default_factory=list)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[tuple[Completion, ...]]:
        self.seen.extend(requests)
        return [
            tuple(self._one(request, number) for number in range(request.num_candidates))
            for request in requests
        ]

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return [(-0.25,) * len(request.token_ids) for request in requests]

    def load_weights(self, checkpoint: CheckpointRef) -> None: ...

    def end_conversations(self) -> None: ...

    def _one(self, request: GenerateRequest, candidate: int) -> Completion:
        text = self.reply(self.tokenizer.decode(request.prompt_ids), candidate)
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        return Completion(ids, (-0.5,) * len(ids), text, "stop")


def team(
    workflow: str,
    tokenizer: Any,
    num_candidates: int = 1,
    config: WorkflowConfig | None = None,
    temperature: float = 1.0,
) -> Team:
    return Team(
        workflow,  # type: ignore[arg-type]
        config or WorkflowConfig(max_input_tokens=512, max_output_tokens=32),
        Prompts("compact"),
        Renderer(tokenizer),
        SamplingConfig(temperature=temperature),
        num_candidates,
        top_k=1,
    )


def play(
    workflow: str,
    texts: Sequence[str | Sequence[str]],
    num_candidates: int = 1,
    question: Question = QUESTION,
    group_index: int = 0,
) -> Trajectory:
    """One workflow that gets `texts` in the order of its calls (a list: one per candidate)."""
    tokenizer = word_tokenizer()
    script = iter(texts)
    current: list[str | Sequence[str]] = [""]

    def reply(_: str, candidate: int) -> str:
        if candidate == 0:
            current[0] = next(script)
        turn = current[0]
        return turn if isinstance(turn, str) else turn[candidate]

    job = Job(question, group_index, seed=group_index)
    engine = Script(tokenizer, reply)
    (trajectory,) = run_workflows(
        [job], team(workflow, tokenizer, num_candidates), engine, OnePassage()
    )
    return trajectory


SEARCH = "<search> a </search>"
REPORT = "<report> x </report>"


def answer(text: str = "x") -> str:
    return f"<answer> {text} </answer>"
