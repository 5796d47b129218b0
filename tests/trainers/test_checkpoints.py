"""Rules: a checkpoint is whole or not there, says what it is by its bytes, and gives all back."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moopd.trainers.checkpoints import (
    CheckpointError,
    TrainingState,
    latest_step,
    load_optimizer,
    load_state,
    reference,
    save_policy,
    save_step,
    verify,
    weights_digest,
)

TOKENIZER = SimpleNamespace(save_pretrained=lambda folder: (folder / "tokenizer.json").touch())


class Saved:
    """A model as far as saving goes: one tensor, or a crash after half of the files."""

    def __init__(self, value: float, crash: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.full((2, 3), value))
        self._crash = crash

    def save_pretrained(self, folder: Path, **_: Any) -> None:
        save_file({"weight": self.weight.detach()}, folder / "model.safetensors")
        if self._crash:
            raise OSError("disk full")


def adam(model: Saved) -> torch.optim.Optimizer:
    return torch.optim.AdamW([model.weight], lr=0.1)


def step(model: Saved, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    model.weight.grad = torch.full((2, 3), gradient)
    optimizer.step()


def test_a_digest_is_over_names_and_bytes_of_the_weights_alone(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        save_policy(Saved(value), TOKENIZER, tmp_path / name)
    (tmp_path / "b" / "notes.txt").write_text("anything")
    first, same, other = (weights_digest(tmp_path / name) for name in "abc")
    assert first == same != other
    (tmp_path / "b" / "model.safetensors").rename(tmp_path / "b" / "model-1.safetensors")
    assert weights_digest(tmp_path / "b") != first
    with pytest.raises(CheckpointError, match="expected a saved policy"):
        weights_digest(tmp_path)


def test_a_frozen_policy_with_other_bytes_or_none_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(Saved(1.0), TOKENIZER, folder)
    frozen = reference("cmas_rl", 7, folder)
    assert verify(frozen) == folder
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"cmas_rl, step 7.*run its training stage again"):
        verify(frozen)
    weights.unlink()
    folder.joinpath("tokenizer.json").unlink()
    folder.rmdir()
    with pytest.raises(CheckpointError, match="got digest nothing"):
        verify(frozen)


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_rest(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(Saved(1.0), TOKENIZER, folder)
    before = weights_digest(folder)
    with pytest.raises(OSError, match="disk full"):
        save_policy(Saved(2.0, crash=True), TOKENIZER, folder)
    assert weights_digest(folder) == before
    assert list(tmp_path.iterdir()) == [folder]


def test_a_new_save_takes_the_place_of_the_old_one_with_all_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    save_policy(Saved(1.0), TOKENIZER, folder)
    (folder / "model-2.safetensors").write_bytes(b"of a larger model")
    save_policy(Saved(2.0), TOKENIZER, folder)
    assert {p.name for p in folder.iterdir()} == {"model.safetensors", "tokenizer.json"}


def test_moments_and_step_counts_come_back_so_that_the_next_update_is_the_same(
    tmp_path: Path,
) -> None:
    model = Saved(1.0)
    optimizer = adam(model)
    step(model, optimizer, 0.5)
    step(model, optimizer, -2.0)
    save_step(tmp_path / "step_2", model, TOKENIZER, optimizer, TrainingState(2))
    resumed, forgetful = Saved(0.0), Saved(0.0)
    for other in (resumed, forgetful):
        other.weight.data.copy_(model.weight.data)
    again = adam(resumed)
    load_optimizer(tmp_path / "step_2", again)
    step(model, optimizer, 1.0)
    step(resumed, again, 1.0)
    step(forgetful, adam(forgetful), 1.0)
    assert torch.equal(model.weight, resumed.weight)
    assert not torch.equal(model.weight, forgetful.weight)


def test_the_state_comes_back_with_its_history(tmp_path: Path) -> None:
    model = Saved(1.0)
    state = TrainingState(4, 2, 0.25, ({"step": 2.0, "dev/em": 0.25}, {"step": 4.0, "dev/em": 0.0}))
    save_step(tmp_path / "step_4", model, TOKENIZER, adam(model), state)
    assert load_state(tmp_path / "step_4") == state


def test_the_newest_whole_step_is_found_by_number_and_half_ones_are_not(tmp_path: Path) -> None:
    assert latest_step(tmp_path / "nowhere") is None
    model = Saved(1.0)
    for number in (2, 10, 999, 1000):
        folder = tmp_path / f"step_{number:06d}"
        save_step(folder, model, TOKENIZER, adam(model), TrainingState(number))
    newest = latest_step(tmp_path)
    assert newest is not None and load_state(newest).step == 1000
    (newest / "training_state.json").unlink()
    (tmp_path / "step_001001").mkdir()
    newest = latest_step(tmp_path)
    assert newest is not None and json.loads((newest / "training_state.json").read_text())[
        "step"
    ] == 999  # fmt: skip
