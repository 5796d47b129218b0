"""Strict and flexible score of saved outputs (section A.1 and A.4).

Strict: the Answerer role's own parser, then exact match. Flexible: rules fixed in a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import yaml
from numpy.typing import NDArray

from moopd.config import ConfigError, Section
from moopd.data.normalize import exact_match
from moopd.evaluation.attempts import Attempts, QuestionSet
from moopd.roles.parsing import parse_answerer
from moopd.types import GiveAnswer

FLEXIBLE_RULES = Path(__file__).resolve().parents[2] / "configs" / "flexible_extraction.yaml"
MISSING = "missing"
"""Kind of failure of a workflow that made no Answerer output at all."""

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


class Rule(Section):
    name: str
    pattern: str
    take: Literal["first", "last"] = "last"


class FlexibleRules(Section):
    """Ordered extraction rules; a function of the output alone."""

    version: int
    strip: str
    rules: tuple[Rule, ...]

    def extract(self, output: str) -> str | None:
        """Text that the first matching rule finds; None where no rule matches."""
        visible = _THINK.sub("", output)
        for pattern, take in self._compiled:
            found: list[str] = pattern.findall(visible)
            for text in reversed(found) if take == "last" else found:
                if bare := text.strip(self.strip):
                    return bare
        return None

    @property
    def _compiled(self) -> list[tuple[re.Pattern[str], str]]:
        # re caches by pattern, so this costs a lookup and keeps the model frozen.
        return [(re.compile(rule.pattern), rule.take) for rule in self.rules]


@dataclass(frozen=True)
class Verdicts:
    """Answers extracted and whether they are right; `correct` (Q, A), `answers` flat."""

    answers: tuple[str | None, ...]
    correct: NDArray[np.bool_]


@dataclass(frozen=True)
class Scored:
    """Attempts with both scores. `failures` flat: the parser's reason, None where well-formed."""

    attempts: Attempts
    strict: Verdicts
    flexible: Verdicts
    failures: tuple[str | None, ...]


def load_rules(path: Path = FLEXIBLE_RULES) -> FlexibleRules:
    """Read the rules file. Raises ConfigError for a pattern without exactly one group."""
    rules = FlexibleRules(**yaml.safe_load(path.read_text(encoding="utf-8")))
    for rule in rules.rules:
        if re.compile(rule.pattern).groups != 1:
            raise ConfigError(f"{path}: rule {rule.name!r} needs exactly one group in its pattern")
    return rules


def extract_strict(output: str) -> tuple[str | None, str | None]:
    """(answer, None) or (None, kind of failure) of one last Answerer output."""
    action = parse_answerer(output)
    if isinstance(action, GiveAnswer):
        return action.text, None
    return None, action.kind.value if output else MISSING


def score(attempts: Attempts, rules: FlexibleRules) -> Scored:
    """Both scores of every record; a missing or malformed answer is wrong and stays."""
    extracted = [extract_strict(output) for output in attempts.outputs]
    strict = tuple(answer for answer, _ in extracted)
    flexible = tuple(rules.extract(output) for output in attempts.outputs)
    return Scored(
        attempts=attempts,
        strict=_verdicts(strict, attempts.questions, attempts.num_attempts),
        flexible=_verdicts(flexible, attempts.questions, attempts.num_attempts),
        failures=tuple(failure for _, failure in extracted),
    )


def _verdicts(answers: Sequence[str | None], questions: QuestionSet, num_attempts: int) -> Verdicts:
    correct = np.fromiter(
        (
            exact_match(answer, questions.questions[number // num_attempts].answers)
            for number, answer in enumerate(answers)
        ),
        dtype=np.bool_,
        count=len(answers),
    )
    return Verdicts(tuple(answers), correct.reshape(len(questions), num_attempts))
