"""The installed verl still has what the plug-in overrides, and a change would be named."""

from __future__ import annotations

import pytest

from moopd.trainers.verl_plugin import contract


def test_the_installed_verl_meets_every_assumption() -> None:
    assert contract.broken_assumptions() == []


def test_a_changed_signature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    def changed(self: object, batch: object) -> None: ...

    monkeypatch.setattr(PPOTrainer, "_compute_advantage", changed)
    (message,) = contract.broken_assumptions()
    assert "PPOTrainer._compute_advantage takes (self, batch), expected" in message
    assert "adapt it there" in message


def test_a_hook_that_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.workers.engine_workers import ActorRolloutRefWorker

    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", lambda self: None)
    (message,) = contract.broken_assumptions()
    assert "the frozen teacher takes the place of the reference model" in message


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "version", lambda _: "0.9.2")
    assert contract.broken_assumptions() == [
        "verl is 0.9.2, expected 0.9.1: install the pinned version"
    ]
