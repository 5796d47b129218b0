"""Questions as the two files that verl reads, in the order in which training uses them.

The training file holds every step's questions, one after the other, so that verl goes once through
it: the order is that of the torch trainer, and no step falls on an epoch's border.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moopd.trainers.loop import questions_of_step
from moopd.trainers.verl_plugin.spec import AGENT_NAME
from moopd.types import Question

TRAIN_FILE = "train.parquet"
DEV_FILE = "dev.parquet"


def write_question_files(
    work: Path,
    train: Sequence[Question],
    dev: Sequence[Question],
    num_steps: int,
    per_step: int,
    seed: int,
) -> None:
    """Write both files into `work`."""
    rows = [
        _row(question, "train", (step - 1) * per_step + number, number)
        for step in range(1, num_steps + 1)
        for number, question in enumerate(questions_of_step(train, per_step, step, seed))
    ]
    _write(work / TRAIN_FILE, rows)
    _write(work / DEV_FILE, [_row(question, "dev", n, n) for n, question in enumerate(dev)])


def _row(question: Question, split: str, index: int, number: int) -> dict[str, Any]:
    """`number`: position within its step, from which sampling seeds derive."""
    return {
        "data_source": split,
        "agent_name": AGENT_NAME,
        "prompt": [{"role": "user", "content": question.text}],
        "reward_model": {"style": "rule", "ground_truth": question.answers[0]},
        "extra_info": {
            "split": split,
            "index": index,
            "number": number,
            "question": json.dumps(asdict(question)),
        },
    }


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
