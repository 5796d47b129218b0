"""The GPU scale without a GPU: SGLang's protocol, packed trainer, old log-probabilities anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from moopd.config import Scale, load_scale
from moopd.engines.local import LocalEngine
from moopd.engines.sglang import SGLangEngine
from moopd.engines.tiny_model import build_tiny
from moopd.systems import load_systems
from moopd.trainers.assemble import assemble, training_task
from moopd.trainers.checkpoints import reference, save_policy
from moopd.trainers.loop import MismatchError, train
from moopd.trainers.packed import FrozenScorer, PackedTrainer
from moopd.trainers.torch_trainer import TorchTrainer
from moopd.types import CheckpointRef, Question
from tests.engines.fake_sglang import FakeSGLang
from tests.support import OnePassage

ROOT = Path(__file__).parents[2]
SYSTEMS = load_systems(ROOT / "configs" / "systems.yaml")
QUESTIONS = [Question(f"q{n}", "nq", f"film {n}", ("x",)) for n in range(4)]
OVERRIDES = (
    "training.stage2_steps=1",
    "training.validation_questions=2",
    "training.num_minibatches=2",
    "workflow.max_output_tokens=6",
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> CheckpointRef:
    folder = tmp_path_factory.mktemp("base") / "policy"
    scale = load_scale(ROOT / "configs" / "scale" / "smoke.yaml")
    model, tokenizer = build_tiny(scale.model, 1)
    save_policy(model, tokenizer, folder)
    return reference("base", 0, folder)


def scale_of(*overrides: str) -> Scale:
    return load_scale(ROOT / "configs" / "scale" / "smoke.yaml", (*OVERRIDES, *overrides))


def run(scale: Scale, base: CheckpointRef, work: Path) -> list[dict[str, float]]:
    task = training_task(scale, SYSTEMS["multiagent_opd"], QUESTIONS, QUESTIONS[:2], 0)
    parts = assemble(scale, task, base, {"cmas_rl": base}, OnePassage())
    assert isinstance(parts.trainer, PackedTrainer)
    assert isinstance(parts.engine, SGLangEngine)
    assert isinstance(parts.teachers["cmas_rl"], FrozenScorer)
    rows: list[dict[str, float]] = []
    train(task, parts, work, lambda step, metrics: rows.append(metrics))
    return rows


def test_a_step_with_sglang_and_the_packed_trainer(base: CheckpointRef, tmp_path: Path) -> None:
    scale = scale_of("training.trainer=packed", "engine.kind=sglang")
    model, tokenizer = build_tiny(scale.model, 5)  # other weights than the base: it must be sent
    with FakeSGLang(model.eval(), tokenizer.eos_token_id) as server:
        engine = scale.engine.model_copy(update={"url": server.url})
        rows = run(scale.model_copy(update={"engine": engine}), base, tmp_path)
        paths = [path for path, _ in server.calls]
    step = next(row for row in rows if "credit/rollout_mismatch" in row)
    assert step["credit/rollout_mismatch"] < 1e-5
    assert step["update/trained_tokens"] > 0
    assert step["update/packed_tokens"] > 0
    # The base, the start of training, the update.
    assert paths.count("/update_weights_from_disk") == 3


def test_weights_that_never_arrived_stop_the_run(base: CheckpointRef, tmp_path: Path) -> None:
    scale = scale_of("training.trainer=packed", "engine.kind=sglang", "training.max_mismatch=1e-3")

    class Deaf(FakeSGLang):
        """Says that it took the weights and keeps its own."""

        def answer(self, path: str, body: dict[str, object]) -> tuple[int, object]:
            if path == "/update_weights_from_disk":
                self.version = str(body["weight_version"])
                return 200, {"success": True, "message": ""}
            return super().answer(path, body)

    model, tokenizer = build_tiny(scale.model, 5)
    with Deaf(model.eval(), tokenizer.eos_token_id) as server:
        engine = scale.engine.model_copy(update={"url": server.url})
        with pytest.raises(MismatchError, match="check weight sync"):
            run(scale.model_copy(update={"engine": engine}), base, tmp_path)


def test_the_cpu_scale_keeps_its_own_engine_and_trainer(base: CheckpointRef) -> None:
    scale = scale_of()
    task = training_task(scale, SYSTEMS["cmas_rl"], QUESTIONS, QUESTIONS[:2], 0)
    parts = assemble(scale, task, base, {}, OnePassage())
    assert isinstance(parts.trainer, TorchTrainer)
    assert isinstance(parts.engine, LocalEngine)
    assert not parts.recompute_old
