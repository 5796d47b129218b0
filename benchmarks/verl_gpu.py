"""The distributed trainer on one GPU: both stages, each killed once and resumed, and a 4B shape.

    python -m benchmarks.verl_gpu --phase stages shape torch --work build/verl_gpu --out FOLDER

Needs verl and SGLang importable by MOOPD_VERL_PYTHON (default: this interpreter). `--model` takes a
transformers folder of a real instruct model; without it a 0.3B model of random weights is first
shown, for some seconds, how the roles act. Every phase writes `PHASE.json` into the out folder and
can be called again; a failed one does not keep the next from running.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu_parts import SHAPES
from moopd.config import Scale
from moopd.systems import load_systems
from moopd.trainers.checkpoints import reference, save_policy
from moopd.trainers.loop import TrainingTask
from moopd.trainers.verl_plugin.launch import (
    PYTHON_VARIABLE,
    launch_stage,
    make_run,
    train_with_verl,
)
from moopd.trainers.verl_plugin.overrides import StartPoint
from moopd.trainers.verl_plugin.process import VerlError, descendants
from moopd.types import CheckpointRef, ScoreRequest, TrainingSample
from tests.support import word_tokenizer
from tests.trainers.verl_plugin.scene import examples, questions, retrieval_server, teach

_SYSTEMS = Path(__file__).parents[1] / "configs" / "systems.yaml"
_TRAINED = ("cmas_rl", "multiagent_opd")
_KEPT = ("credit/", "update/", "timing_s/", "dev/em", "train/em", "train/searches", "train/steps",
         "train/malformed", "actor/perf/max", "actor/pg", "actor/ppo", "actor/entropy",
         "training/rollout", "perf/", "prompt_length/mean", "response_length/mean")  # fmt: skip

STAGES = """
name: verl-gpu
model: {prompt_style: compact}
workflow: {max_input_tokens: 1024, max_output_tokens: 32}
retrieval: {top_k: 3}
training: {trainer: verl, lr: 1.0e-6, stage1_steps: 5, stage2_steps: 5, validate_every: 5,
  checkpoint_every: 1, validation_questions: 16, tokens_per_microbatch: 8192}
verl: {gpus: 1, attention: sdpa, gpu_memory_utilization: 0.3, max_running_requests: 256,
  agent_workers: 4, storage_units: 2, deadline_hours: 0.25, call_timeout_s: 240, keep_rows: true}
"""
SHAPE = """
name: verl-gpu-shape
model: {prompt_style: compact}
workflow: {max_input_tokens: 1024, max_output_tokens: 128, hierarchy_steps: 4}
training: {trainer: verl, lr: 1.0e-6, stage2_steps: 2, tokens_per_microbatch: 8192,
  gradient_checkpointing: true, max_mismatch: 2.0}
verl: {gpus: 1, attention: sdpa, gpu_memory_utilization: 0.4, max_running_requests: 256,
  offload_optimizer: true, agent_workers: 4, storage_units: 2, deadline_hours: 0.16,
  call_timeout_s: 240, keep_rows: true,
  overrides: [trainer.save_freq=-1, trainer.test_freq=-1, trainer.val_before_train=False]}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=("stages", "shape", "torch"), nargs="+", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="transformers folder of an instruct model")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-4b")
    parser.add_argument("--kill", nargs="*", choices=_TRAINED, default=_TRAINED,
                        help="stages that lose all their processes once")  # fmt: skip
    arguments = parser.parse_args()
    os.environ.setdefault(PYTHON_VARIABLE, sys.executable)
    arguments.work = arguments.work.resolve()
    arguments.work.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(arguments.work / "triton"))
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = [name for name in arguments.phase if not _run_phase(name, arguments)]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def _run_phase(name: str, arguments: Any) -> bool:
    """Whether the phase ended; its report and verl's logs are written in any case."""
    phase = {"stages": run_stages, "shape": run_shape, "torch": run_torch}[name]
    report = Report(arguments.out / f"{name}.json")
    try:
        phase(arguments, report)
    except Exception as error:
        report.content["error"] = str(error)[:2000]
        traceback.print_exc()
    finally:
        report.write()
        for log in arguments.work.glob("*/verl.log"):
            shutil.copy(log, arguments.out / f"{log.parent.name}.log")
    return "error" not in report.content


class Report:
    """What was seen, written also when a phase breaks off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = {}

    def step(self, name: str, step: int, metrics: dict[str, float]) -> None:
        kept = {k: round(v, 6) for k, v in metrics.items() if k.startswith(_KEPT)}
        self.content.setdefault(name, []).append({"step": step, "at": time.time(), **kept})
        print(name, step, json.dumps(kept), flush=True)
        self.write()

    def write(self) -> None:
        self._path.write_text(json.dumps(self.content, indent=1))


def run_stages(arguments: Any, report: Report) -> None:
    """Stage I, freeze, Stage II, five steps each; those in `kill` lose all their processes once."""
    scale = Scale(**yaml.safe_load(STAGES))
    work: Path = arguments.work
    if arguments.model:
        chat: dict[str, Any] = {"model": scale.model.model_copy(update={"prompt_style": "chat"})}
        longer = {"max_input_tokens": 3072, "max_output_tokens": 64}
        chat["workflow"] = scale.workflow.model_copy(update=longer)
        scale = scale.model_copy(update=chat)
        base = reference("base", 0, arguments.model)
    else:
        base = _taught(work / "base")
    with retrieval_server() as url, gpu_memory() as peak:
        teachers: dict[str, CheckpointRef] = {}
        for name in _TRAINED:
            task = _task(scale, name, 5)
            if name in arguments.kill:
                _run_and_kill(scale, task, base, teachers, url, work / name, report)
            began = time.time()
            result = train_with_verl(
                scale, task, base, teachers, url, work / name,
                lambda step, metrics, name=name: report.step(name, step, metrics),
            )  # fmt: skip
            report.content[f"{name}/last_launch_s"] = round(time.time() - began, 1)
            teachers[name] = result.best
        report.content["peak_gpu_memory_mib"] = max(peak, default=0)


def _run_and_kill(
    scale: Scale, task: TrainingTask, base: CheckpointRef, teachers: dict[str, CheckpointRef],
    url: str, work: Path, report: Report,
) -> None:  # fmt: skip
    """Kill every process of the stage once its third step is logged."""

    def log(step: int, metrics: dict[str, float]) -> None:
        report.step(f"{task.system.name}/killed", step, metrics)
        if step == 3:
            for process in descendants(str(work)):
                process.kill()

    began = time.time()
    try:
        train_with_verl(scale, task, base, teachers, url, work, log)
    except VerlError as error:
        report.content[f"{task.system.name}/killed_after_s"] = round(time.time() - began, 1)
        print(str(error)[:200], flush=True)


def run_shape(arguments: Any, report: Report) -> None:
    """Two steps at a large shape: random weights, another random model as teacher."""
    scale = Scale(**yaml.safe_load(SHAPE))
    work: Path = arguments.work
    base = _random(work / "shape_base", arguments.shape, 0)
    teacher = _random(work / "shape_teacher", arguments.shape, 1)
    task = _task(scale, "multiagent_opd", 2)
    folder = work / "shape"
    shutil.rmtree(folder, ignore_errors=True)
    with retrieval_server() as url, gpu_memory() as peak:
        run = make_run(scale, task, base, {"cmas_rl": teacher}, url, folder)
        run.write()
        began = time.time()
        try:
            launch_stage(
                scale, task, run, StartPoint(0, 2, validated=True), base.path,
                lambda step, metrics: report.step("shape", step, metrics),
            )  # fmt: skip
        finally:
            report.content["seconds"] = round(time.time() - began, 1)
            report.content["peak_gpu_memory_mib"] = max(peak, default=0)


def run_torch(arguments: Any, report: Report) -> None:
    """The update of the one-device trainers on the rows that verl trained in its last step."""
    from moopd.trainers.packed import PackedTrainer
    from moopd.trainers.torch_trainer import TorchTrainer
    from moopd.trainers.verl_plugin.rows import read_samples

    measured = (
        ("stages/torch", TorchTrainer, "float32", "base", "multiagent_opd", STAGES, 5),
        ("stages/packed", PackedTrainer, "bfloat16", "base", "multiagent_opd", STAGES, 5),
        ("shape/packed", PackedTrainer, "bfloat16", "shape_base", "shape", SHAPE, 2),
    )
    for name, trainer, dtype, model, rows, text, step in measured:
        folder = arguments.work / rows
        if (folder / "rows" / f"{step:06d}.jsonl.gz").is_file():
            samples = read_samples(folder, step)
            config = Scale(**yaml.safe_load(text)).training
            given = arguments.model if model == "base" else None
            policy = given or arguments.work / model
            report.content[name] = _timed(trainer, policy, dtype, config, samples)
            print(name, report.content[name], flush=True)
            report.write()


def _timed(
    trainer_class: Any, folder: Path, dtype: str, config: Any, samples: list[TrainingSample]
) -> dict[str, float]:
    """Seconds of old log-probabilities and of the update, cold and warm; peak memory in GiB."""
    import torch

    from moopd.engines.models import load_policy

    model, tokenizer = load_policy(str(folder), dtype, "cuda")
    trainer = trainer_class(model, tokenizer, config)
    requests = [ScoreRequest(s.prompt_ids, s.token_ids) for s in samples]
    torch.cuda.reset_peak_memory_stats()
    seen: dict[str, float] = {"rows": len(samples)}
    for turn in ("cold", "warm"):
        for phase, call in (("old_log_prob", _score), ("update", _update)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            call(trainer, samples, requests)
            torch.cuda.synchronize()
            seen[f"{phase}_s/{turn}"] = round(time.perf_counter() - began, 2)
    seen["peak_memory_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    del trainer, model
    torch.cuda.empty_cache()
    return seen


def _score(trainer: Any, _: list[TrainingSample], requests: list[ScoreRequest]) -> None:
    trainer.score(requests)


def _update(trainer: Any, samples: list[TrainingSample], _: list[ScoreRequest]) -> None:
    trainer.update(samples, 0)


def _task(scale: Scale, name: str, num_steps: int) -> TrainingTask:
    return TrainingTask(
        system=load_systems(_SYSTEMS)[name],
        seed=7,
        num_steps=num_steps,
        training=scale.training,
        workflow=scale.workflow,
        evaluation=scale.evaluation,
        train_questions=questions(400),
        dev_questions=questions(16),
        top_k=scale.retrieval.top_k,
    )


def _taught(folder: Path) -> CheckpointRef:
    """0.3B parameters, random, then shown scripted workflows until it acts in them."""
    if not any(folder.glob("model*.safetensors")):
        tokenizer = word_tokenizer()
        shape = {
            "vocab_size": len(tokenizer),
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
        }
        policy = _model(tokenizer, shape, "float32", seed=0)
        teach(policy, examples(), steps=80, lr=2e-4)
        _save(policy, tokenizer, folder)
    return reference("base", 0, folder)


def _random(folder: Path, shape: str, seed: int) -> CheckpointRef:
    """Random bfloat16 weights of a published shape, with a small tokenizer."""
    if not any(folder.glob("model*.safetensors")):
        tokenizer = word_tokenizer()
        _save(_model(tokenizer, SHAPES[shape], "bfloat16", seed), tokenizer, folder)
    return reference("base", 0, folder)


def _model(tokenizer: Any, shape: dict[str, int], dtype: str, seed: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    # SGLang ends a completion at the config's end token: it sees no tokenizer.
    config = Qwen3Config(
        **shape,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    import torch

    save_policy(model.to("cpu"), tokenizer, folder)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def gpu_memory(interval_s: float = 1.0) -> Iterator[list[int]]:
    """Memory in use on the GPU in MiB, sampled while the block runs."""
    seen: list[int] = []
    done = threading.Event()
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]

    def watch() -> None:
        while not done.wait(interval_s):
            try:
                text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            seen.append(max(int(line) for line in text.split()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


if __name__ == "__main__":
    main()
