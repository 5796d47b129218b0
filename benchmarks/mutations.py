"""Break the mathematics once per line and see a test go red.

    python benchmarks/mutations.py

Each mutation is made in a copy of the project; a green run of the named tests is a failure here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tasks.home import ROOT


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "candidates mixed across teams", "moopd/rl/advantages.py",
        "yield (Role.ANSWERER, question, workflow), (candidate,), reward",
        "yield (Role.ANSWERER, question, 0), (workflow * 9 + candidate,), reward",
        "tests/rl",
    ),
    Mutation(
        "flipped OPD sign", "moopd/rl/advantages.py",
        "beta * (t - o)", "beta * (o - t)", "tests/rl",
    ),
    Mutation(
        "OPD on prompt and passage tokens", "moopd/rl/samples.py",
        "token_ids=token.completion.token_ids,\n            old_logprobs",
        "token_ids=(*token.prompt_ids[-1:], *token.completion.token_ids),\n"
        "            old_logprobs",
        "tests/rl",
    ),
    Mutation(
        "min and max swapped in the clip", "moopd/rl/losses.py",
        "torch.maximum(unclipped, clipped)", "torch.minimum(unclipped, clipped)", "tests/rl",
    ),
    Mutation(
        "steps counted per call", "moopd/workflows/base.py",
        "self.num_tool_steps += bool(queries)", "self.num_tool_steps += len(queries)",
        "tests/workflows",
    ),
    Mutation(
        "bonus not capped at 6", "moopd/rl/rewards.py",
        "min(num_tool_steps, MAX_TOOL_STEPS) / MAX_TOOL_STEPS", "num_tool_steps / MAX_TOOL_STEPS",
        "tests/rl",
    ),
    Mutation(
        "passages trained on", "moopd/rl/batch.py",
        "start = len(sample.prompt_ids)", "start = len(sample.prompt_ids) - 1", "tests/rl",
    ),
    Mutation(
        "attempts sharing one seed", "moopd/evaluation/runner.py",
        "derive_seed(seed, _EVALUATION, word, attempt)", "derive_seed(seed, _EVALUATION, word)",
        "tests/evaluation/test_runner.py",
    ),
    Mutation(
        "teacher shifted by one token", "moopd/engines/local.py",
        "start = len(requests[number].prompt_ids) - 1", "start = len(requests[number].prompt_ids)",
        "tests/engines/test_local.py",
    ),
    Mutation(
        "unbiased std replaced by biased", "moopd/rl/advantages.py",
        "/ (len(rewards) - 1)", "/ len(rewards)", "tests/rl",
    ),
    Mutation(
        "malformed candidate counts 0 instead of -1", "moopd/rl/rewards.py",
        "FORMAT_PENALTY if answer is None else score", "score", "tests/rl",
    ),
    Mutation(
        "outcome of the first candidate alone", "moopd/rl/rewards.py",
        "return max(candidate_scores(trajectory), default=0.0)",
        "return next(iter(candidate_scores(trajectory)), 0.0)", "tests/rl",
    ),
    Mutation(
        "KL on an outcome-rewarded Searcher", "moopd/rl/advantages.py",
        "train.kl_teacher is not None and row.owner.role is not Role.SEARCHER",
        "train.kl_teacher is not None", "tests/rl",
    ),
    Mutation(
        "workflows of one question sharing a seed", "moopd/trainers/loop.py",
        "derive_seed(task.seed, 0, step, number, member)",
        "derive_seed(task.seed, 0, step, number)", "tests/trainers/test_loop.py",
    ),
)  # fmt: skip


def main() -> int:
    tests = sorted({mutation.tests for mutation in MUTATIONS})
    if _status(None, *tests) != 0:
        raise SystemExit("the tests fail without any mutation; mend them first")
    survivors = [mutation.what for mutation in MUTATIONS if not _goes_red(mutation)]
    print(f"{len(MUTATIONS) - len(survivors)} of {len(MUTATIONS)} mutations turned a test red")
    return 1 if survivors else 0


def _goes_red(mutation: Mutation) -> bool:
    # 1: tests failed; anything else (no tests, a broken import) proves nothing.
    red = _status(mutation, mutation.tests) == 1
    print(f"{'red  ' if red else 'GREEN'} {mutation.what}", flush=True)
    return red


def _status(mutation: Mutation | None, *tests: str) -> int:
    """pytest's exit status on a copy of the project, mutated or not."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("moopd", "tests", "tasks", "flows", "configs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        if mutation is not None:
            _mutate(copy / mutation.file, mutation)
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
            cwd=copy, capture_output=True, text=True, check=False,
        ).returncode  # fmt: skip


def _mutate(source: Path, mutation: Mutation) -> None:
    text = source.read_text()
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.what}: {mutation.file} holds {mutation.old!r} "
                         f"{text.count(mutation.old)} times, expected once")  # fmt: skip
    source.write_text(text.replace(mutation.old, mutation.new))


if __name__ == "__main__":
    sys.exit(main())
