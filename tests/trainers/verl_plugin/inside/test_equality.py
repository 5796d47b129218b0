"""One batch of trajectories through the torch trainer and through verl's own worker and loss.

Advantages agree exactly, the loss within 1e-5, the gradient in direction (cosine above 0.9999) and
norm (within 0.1 %). verl's side is its FSDP engine, its log-probability pass, its PPO loss and the
plug-in's advantages; no Ray, one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moopd.rl.samples import CreditedBatch, build_samples
from moopd.trainers.loop import credit_config
from moopd.trainers.verl_plugin.overrides import StartPoint, verl_overrides
from moopd.trainers.verl_plugin.rows import VerlRow, rows_of
from moopd.trainers.verl_plugin.spec import VerlRun
from moopd.types import Completion, Trajectory
from tests.support import team
from tests.trainers.verl_plugin import scene
from tests.trainers.verl_plugin.test_rows_and_credit import run_of

SYSTEMS = ("multiagent_opd", "opd_no_searcher_loss", "opd_base_teacher")
_NO_CLIP = 1e9


@dataclass(frozen=True)
class World:
    """Student and teachers on disk, and what the student did."""

    folder: Path
    trajectories: list[Trajectory]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    import torch

    from moopd.engines.local import LocalEngine
    from moopd.engines.models import load_policy
    from moopd.workflows.rollout import Job, run_workflows

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("policies")
    scene.save_taught(folder / "student", "base", seed=0)
    scene.save_taught(folder / "cmas_rl", "cmas_rl", seed=1, steps=40)
    scene.save_tiny(folder / "base", "base", seed=2)
    model, tokenizer = load_policy(str(folder / "student"))
    scale = scene.smoke_scale()
    jobs = [
        Job(question, member, seed=97 * number + member)
        for number, question in enumerate(scene.questions(4))
        for member in range(2)
    ]
    trajectories = run_workflows(
        jobs,
        team("hierarchy", tokenizer, 2, scale.workflow),
        LocalEngine(model, tokenizer),
        scene.WordRetriever(),
    )
    return World(folder, [_as_other_engine(t) for t in trajectories])


def _as_other_engine(trajectory: Trajectory) -> Trajectory:
    """Sampling log-probabilities as of an engine with other numerics: importance weights count."""

    def drift(completion: Completion) -> Completion:
        shifted = tuple(p + (0.05, -0.08, 0.9)[n % 3] for n, p in enumerate(completion.logprobs))
        return replace(completion, logprobs=shifted)

    calls = tuple(
        replace(call, completions=tuple(map(drift, call.completions))) for call in trajectory.calls
    )
    return replace(trajectory, calls=calls)


def run_for(name: str, world: World) -> VerlRun:
    # A sum over a whole batch: one minibatch, no clipping, so that gradients can be compared.
    training = {"num_minibatches": 1, "grad_clip": _NO_CLIP, "kl_coef": 0.05, "lr": 1e-9}
    return run_of(name, **training).model_copy(
        update={
            "work": str(world.folder),
            "teachers": {n: str(world.folder / n) for n in ("cmas_rl", "base")},
        }
    )


@dataclass(frozen=True)
class Side:
    advantages: dict[Any, tuple[float, ...]]
    loss: float
    gradient: dict[str, Any]


@pytest.fixture
def process_group() -> Iterator[None]:
    import torch.distributed as dist

    from moopd.trainers.verl_plugin.cpu import prepare_worker

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="29533",
                      DISABLE_WORKER_INIT="1")  # fmt: skip
    prepare_worker()
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", SYSTEMS)
def test_both_trainers_make_the_same_update(
    name: str, world: World, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    run = run_for(name, world)
    run.write()
    worker = verl_worker(run, world)
    rows = [row for t in world.trajectories for row in rows_of(t, run.row.searcher, filler=1)]
    data = as_verl_batch(rows)
    old = of_sequences(rows, response_logprobs(worker.actor.infer_batch(data.clone()), rows))
    reference = of_sequences(rows, response_logprobs(worker.ref.infer_batch(data.clone()), rows))
    second = (
        of_sequences(rows, response_logprobs(worker._second.infer_batch(data.clone()), rows))
        if run.second_teacher
        else None
    )
    theirs = verl_side(run, worker, rows, data, old, reference, second, monkeypatch)
    ours, batch = torch_side(run, world, rows, old, reference, second)

    assert any(s.rollout_weights and min(s.rollout_weights) < 0.9 for s in batch.samples)
    assert theirs.advantages == ours.advantages
    assert theirs.loss == pytest.approx(ours.loss, abs=1e-5)
    names = sorted(ours.gradient)
    a = torch.cat([ours.gradient[n].flatten() for n in names])
    b = torch.cat([theirs.gradient[n].flatten() for n in names])
    assert float(a.norm()) > 1e-4
    assert float(torch.nn.functional.cosine_similarity(a, b, dim=0)) > 0.9999
    assert float(b.norm() / a.norm()) == pytest.approx(1.0, abs=1e-3)


def test_log_probabilities_of_both_sides_agree(world: World, process_group: None) -> None:
    from moopd.engines.models import load_policy
    from moopd.trainers.torch_trainer import TorchTrainer
    from moopd.types import ScoreRequest

    run = run_for("multiagent_opd", world)
    run.write()
    worker = verl_worker(run, world)
    rows = [row for t in world.trajectories for row in rows_of(t, run.row.searcher, filler=1)]
    data = as_verl_batch(rows)
    for engine, folder in ((worker.actor, "student"), (worker.ref, "cmas_rl")):
        found = response_logprobs(engine.infer_batch(data.clone()), rows)
        trainer = TorchTrainer(*load_policy(str(world.folder / folder)), run.training)
        expected = trainer.score([ScoreRequest(r.prompt_ids, r.token_ids) for r in rows])
        for ours, theirs in zip(expected, found, strict=True):
            assert theirs == pytest.approx(ours, abs=1e-5)


def verl_worker(run: VerlRun, world: World) -> Any:
    """The plug-in's worker with actor and teachers, as verl configures it."""
    from hydra import compose, initialize_config_module

    from moopd.trainers.verl_plugin.workers import TeacherWorker

    start = StartPoint(0, run.num_steps, validated=True)
    listed = verl_overrides(scene.smoke_scale(), run, str(world.folder / "student"), start)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", [o for o in listed if not o.startswith("hydra.")])
    worker = TeacherWorker(config=config.actor_rollout_ref, role="actor_rollout_ref")
    worker.init_model()
    worker.whole_config = config
    return worker


def as_verl_batch(rows: list[VerlRow]) -> Any:
    """Rows as verl's queue would hand them to a worker."""
    import torch
    from verl.utils import tensordict_utils as tu

    def nested(values: list[Any], dtype: Any = torch.int64) -> Any:
        return torch.nested.as_nested_tensor(
            [torch.tensor(value, dtype=dtype) for value in values], layout=torch.jagged
        )

    sequences = [(*row.prompt_ids, *row.token_ids) for row in rows]
    return tu.get_tensordict(
        {
            "prompts": nested([row.prompt_ids for row in rows]),
            "responses": nested([row.token_ids for row in rows]),
            "input_ids": nested(sequences),
            "position_ids": nested([range(len(s)) for s in sequences]),
            "response_mask": nested([[int(row.trained)] * len(row.token_ids) for row in rows]),
            "loss_mask": nested([[int(row.trained)] * len(row.token_ids) for row in rows]),
            "rollout_log_probs": nested([row.logprobs for row in rows], torch.float32),
        },
        {
            "temperature": 1.0,
            "calculate_entropy": True,
            "compute_loss": False,
            "global_token_num": [len(s) for s in sequences],
        },
    )


def response_logprobs(output: Any, rows: list[VerlRow]) -> list[tuple[float, ...]]:
    found = []
    for row, values in zip(rows, output["log_probs"].unbind(), strict=True):
        # Position t holds the log-probability of token t + 1.
        end = len(row.prompt_ids) + len(row.token_ids) - 1
        found.append(tuple(values[end - len(row.token_ids) : end].tolist()))
    return found


def of_sequences(rows: list[VerlRow], values: list[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """One value for equal sequences, as our trainer has: in verl the neighbours in a microbatch
    move the last bit."""
    known = {(r.prompt_ids, r.token_ids): v for r, v in zip(rows, values, strict=True)}
    return [known[row.prompt_ids, row.token_ids] for row in rows]


def verl_side(
    run: VerlRun,
    worker: Any,
    rows: list[VerlRow],
    data: Any,
    old: list[tuple[float, ...]],
    reference: list[tuple[float, ...]],
    second: list[tuple[float, ...]] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> Side:
    """The plug-in's advantages on verl's queue, then verl's forward, loss and backward."""
    import torch
    from verl.utils import tensordict_utils as tu

    from moopd.trainers.verl_plugin import trainer as plugin

    written: dict[str, Any] = {}

    def nested(values: list[tuple[float, ...]]) -> Any:
        return torch.nested.as_nested_tensor(
            [torch.tensor(value) for value in values], layout=torch.jagged
        )

    stored = {
        "response_mask": data["response_mask"],
        "rollout_log_probs": data["rollout_log_probs"],
        "old_log_probs": nested(old),
        "ref_log_prob": nested(reference),
        "extra_fields": [{"moopd": {**r.meta, "measures": r.measures}} for r in rows],
        **({"second_log_prob": nested(second)} if second else {}),
    }
    monkeypatch.setattr(
        plugin.tq, "kv_batch_get", lambda select_fields, **_: {
            name: stored[name] for name in select_fields if name in stored
        },
    )  # fmt: skip
    monkeypatch.setattr(
        plugin.tq, "kv_batch_put", lambda fields, **_: written.update(fields.to_dict())
    )
    trainer = object.__new__(plugin.MoopdTrainer)
    trainer.moopd = run
    trainer.config = worker.whole_config
    batch = SimpleNamespaceBatch(rows)
    plugin.MoopdTrainer._compute_advantage(trainer, batch, {})

    names = ("advantages", "response_mask", "loss_mask", "rollout_is_weights")
    for name in names:
        data[name] = written[name]
    data["old_log_probs"] = stored["old_log_probs"]
    engine = worker.actor.engine
    tu.assign_non_tensor(
        data,
        global_batch_size=len(rows),
        use_dynamic_bsz=True,
        max_token_len_per_gpu=4096,
        use_remove_padding=engine.engine_config.use_remove_padding,
        use_fused_kernels=engine.engine_config.use_fused_kernels,
    )
    assert engine.engine_config.use_remove_padding and engine.engine_config.use_fused_kernels
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, worker.loss_fn, forward_only=False)
        gradient = {
            name: parameter.grad.full_tensor().clone()
            for name, parameter in engine.module.named_parameters()
        }
    masks = written["response_mask"].unbind()
    advantages = {
        _owner(row): tuple(values.tolist())
        for row, values, mask in zip(rows, written["advantages"].unbind(), masks, strict=True)
        if bool(mask.any())
    }
    return Side(advantages, float(sum(output["loss"])), gradient)


class SimpleNamespaceBatch(SimpleNamespace):
    """Enough of verl's batch of keys for the advantages."""

    def __init__(self, rows: list[VerlRow]) -> None:
        super().__init__(keys=list(range(len(rows))), partition_id="train", tags=[{}] * len(rows))

    def __len__(self) -> int:
        return len(self.keys)


def torch_side(
    run: VerlRun,
    world: World,
    rows: list[VerlRow],
    old: list[tuple[float, ...]],
    reference: list[tuple[float, ...]],
    second: list[tuple[float, ...]] | None,
) -> tuple[Side, CreditedBatch]:
    """`build_samples` and `TorchTrainer.update` on the same log-probabilities."""
    from moopd.engines.models import load_policy
    from moopd.trainers.torch_trainer import TorchTrainer

    def scores(values: list[tuple[float, ...]]) -> Any:
        known = {(r.prompt_ids, r.token_ids): v for r, v in zip(rows, values, strict=True)}
        return lambda requests: [known[q.prompt_ids, q.token_ids] for q in requests]

    teachers: Any = {
        run.reference_teacher: SimpleNamespace(score=scores(reference)),
        **({run.second_teacher: SimpleNamespace(score=scores(second))} if second else {}),
    }
    batch = build_samples(
        world.trajectories,
        run.row,
        credit_config(run.training),
        teachers,
        rescore=scores(old),
        importance_cap=run.training.importance_cap,
    )
    model, tokenizer = load_policy(str(world.folder / "student"))
    trainer = TorchTrainer(model, tokenizer, run.training)
    metrics = trainer.update(batch.samples, seed=0)
    gradient = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    import torch

    advantages = {
        sample.owner: tuple(torch.tensor(sample.advantages).tolist()) for sample in batch.samples
    }
    return Side(advantages, metrics["loss"], gradient), batch


def _owner(row: VerlRow) -> Any:
    from moopd.trainers.verl_plugin.rows import owner_of

    return owner_of(row.meta)
