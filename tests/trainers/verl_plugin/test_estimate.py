"""Paper-scale figures redone by hand, and a preflight that names what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moopd.config import ConfigError, CriticConfig, Scale, load_scale
from moopd.systems import load_systems
from moopd.trainers.verl_plugin import estimate as est
from moopd.trainers.verl_plugin import preflight as pre
from tests.rl.fake_judge import FakeJudge
from tests.trainers.verl_plugin import scene

PAPER = scene.SYSTEMS.parent / "scale" / "paper.yaml"


@pytest.fixture(scope="module")
def paper() -> Scale:
    return load_scale(PAPER)


def named(figures: list[est.Figure]) -> dict[str, float]:
    return {figure.name: figure.value for figure in figures}


def test_memory_per_gpu_by_hand(paper: Scale) -> None:
    found = named(est.memory_per_gpu(paper, est.shape_of(paper)))
    # 16 B x 4.02e9 / 8 GPUs = 8.04 GB; cache 2 x 36 x 8 x 128 x 2 B = 147,456 B a token.
    assert found["training states"] == pytest.approx(8.04)
    assert found["KV cache"] == pytest.approx(147.456)
    # 147,456 B x 8,704 tokens.
    assert found["KV cache of one full prompt"] == pytest.approx(1.2835, abs=1e-4)
    # 16,384 tokens x 36 layers x 2,560 x 2 B; 512 tokens x 151,936 x 26 B.
    assert found["activations"] == pytest.approx(3.0199, abs=1e-3)
    assert found["logits"] == pytest.approx(2.0226, abs=1e-3)


def test_one_gpu_holds_all_states_at_the_peak_even_if_the_optimizer_rests_on_the_host() -> None:
    one = load_scale(PAPER, ["verl.gpus=1", "verl.offload_optimizer=true"])
    found = named(est.memory_per_gpu(one, est.shape_of(one)))
    assert found["training states"] == pytest.approx(16 * 4.02)
    assert found["rollout weights"] == pytest.approx(8.04)


def test_rows_and_tokens_of_a_step_by_hand(paper: Scale) -> None:
    found = named(est.tokens_per_step(paper, est.HIERARCHY))
    assert found["workflows a step"] == 160
    # 160 x (5.39 searches + 3 reports + 2.5 Leader turns + 5 candidates).
    assert found["rows a step"] == pytest.approx(160 * 15.89)
    assert found["new tokens a step"] == 160 * (697 + 4 * 15)
    assert found["tokens of a pass"] == 160 * (9172 + 4 * 600 + 757)


def test_step_time_by_hand(paper: Scale) -> None:
    measured = est.Measured(rollout_tokens_per_s=10_000, train_flops=1e14, weight_sync_s=0.0)
    shape = est.shape_of(paper)
    found = named(est.step_seconds(paper, shape, est.HIERARCHY, 1, measured))
    work = 160 * 12_329 * 4.02e9
    # 160 x (11,572 prompt + 757 new tokens) on 8 GPUs.
    generation = 160 * 12_329 / 80_000
    assert found["generation"] == pytest.approx(generation)
    assert found["old log-probabilities"] == pytest.approx(2 * work / 8e14)
    assert found["update"] == pytest.approx(8 * work / 8e14)
    assert found["step"] == pytest.approx(generation + 12 * work / 8e14)


def test_the_measured_rollouts_give_back_their_seconds() -> None:
    one = load_scale(PAPER, ["verl.gpus=1", "training.num_candidates=1"])
    load = est.Workload(input_tokens=719_159, output_tokens=135_099)
    assert est.rollout_seconds(one, load, 1, est.Measured()) == pytest.approx(16.76, abs=0.005)


def test_one_80_gb_card_is_refused_at_the_papers_scale(paper: Scale) -> None:
    one = load_scale(PAPER, ["verl.gpus=1"])
    refused = pre.judge_gpus(one, [80.0])
    assert not refused.ok and "verl.gpus" in refused.message
    assert pre.judge_gpus(one, [150.0]).ok and pre.judge_gpus(paper, [80.0] * 8).ok


def test_index_and_disk_by_hand(paper: Scale) -> None:
    found = named(est.retrieval(paper, est.Measured(search_bytes_per_s=1e11)))
    # 21,015,324 passages x 768 x 4 B.
    assert found["index in memory"] == pytest.approx(64.559, abs=1e-3)
    assert found["one scan"] == pytest.approx(0.64559, abs=1e-5)
    space = named(est.disk(paper, est.shape_of(paper), num_trained=6))
    assert space["checkpoint"] == pytest.approx(16 * 4.02)
    assert space["policies kept"] == pytest.approx(2 * 6 * 4 * 4.02)


def test_every_trained_row_has_its_hours(paper: Scale) -> None:
    systems = load_systems(scene.SYSTEMS)
    sections = est.estimate(paper, systems)
    hours = named(sections["time"])
    assert {f"train {s.name}" for s in systems.values() if s.train} <= set(hours)
    assert hours["train opd_base_teacher"] > hours["train multiagent_opd"]
    assert hours["train cmas_rl"] < hours["train multiagent_opd"]
    text = est.render(sections)
    assert "KV cache" in text and "GPU hours" in text


def test_shape_is_read_from_a_folder(tmp_path: Path) -> None:
    policy = scene.save_tiny(tmp_path / "policy", "base", 0)
    scale = load_scale(PAPER, [f"model.path={policy.path}"])
    shape = est.shape_of(scale)
    from moopd.engines.models import load_policy

    model, _ = load_policy(policy.path)
    exact = sum(p.numel() for p in model.parameters())
    assert shape.parameters == pytest.approx(exact, rel=0.02)  # norms are left out
    with pytest.raises(ConfigError, match="neither a known model nor a folder"):
        est.shape_of(load_scale(PAPER, ["model.path=/nowhere"]))


def test_disk_and_corpus_failures_say_what_to_do(paper: Scale, tmp_path: Path) -> None:
    systems = load_systems(scene.SYSTEMS)
    vast = paper.model_copy(
        update={"retrieval": paper.retrieval.model_copy(
            update={"encoder": paper.retrieval.encoder.model_copy(update={"dimension": 10**7})}
        )}
    )  # fmt: skip
    check = pre.check_disk(vast, systems, tmp_path / "not" / "there")
    assert not check.ok and "free space or move the home" in check.message
    assert not pre.check_host_memory(vast).ok
    corpus = pre.check_corpus(load_scale(PAPER, [f"data.corpus={tmp_path}/none.jsonl"]))
    assert not corpus.ok and "fetch it" in corpus.message


def test_gpus_are_counted_and_measured(paper: Scale) -> None:
    assert pre.judge_gpus(paper, [80.0] * 8).ok
    assert "got 4 GPUs, verl.gpus is 8" in pre.judge_gpus(paper, [80.0] * 4).message
    small = pre.judge_gpus(paper, [12.0] * 8)
    assert not small.ok and "tokens_per_microbatch" in small.message


def test_a_probe_with_other_versions_or_problems_fails() -> None:
    good = {"verl": "0.9.1", "tensordict": "0.10.0", "TransferQueue": "0.1.11", "torch": "2.13.0"}
    assert pre.judge_probe({"versions": good, "problems": []}, "cpu").ok
    other = pre.judge_probe({"versions": {**good, "tensordict": "0.11"}, "problems": []}, "cpu")
    assert other.message == "tensordict is 0.11, expected 0.10.0"
    gpu = pre.judge_probe({"versions": {**good, "sglang": "0.5.12"}, "problems": ["x is gone"]},
                          "cuda")  # fmt: skip
    assert not gpu.ok and gpu.message == "x is gone"
    assert not pre.judge_probe(json.loads('{"versions": 1, "problems": []}'), "cpu").ok


def test_a_judge_that_is_down_is_said_before_the_row_that_needs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pre, "check_environment", lambda _: pre.Check("verl environment", True, ""))
    systems = load_systems(scene.SYSTEMS)
    scale = scene.smoke_scale()

    def judge(url: str, *names: str) -> list[pre.Check]:
        critic = CriticConfig(kind="http", url=url)
        chosen = {name: systems[name] for name in names}
        found = pre.preflight(scale.model_copy(update={"critic": critic}), chosen, tmp_path)
        return [check for check in found if check.name == "judge"]

    with FakeJudge(lambda *_: "") as live:
        assert [check.ok for check in judge(live.url, "prompted_critic")] == [True]
        assert [check.ok for check in judge(f"{live.url}/v1", "prompted_critic")] == [True]
    (down,) = judge(live.url, "cmas_rl", "prompted_critic")
    assert not down.ok
    assert f"{live.url}/v1/models does not answer" in down.message
    assert "start it or correct critic.url" in down.message
    assert judge(live.url, "cmas_rl", "multiagent_opd") == []


def test_an_endpoint_that_does_not_answer_is_named(paper: Scale) -> None:
    check = pre.check_judge(load_scale(PAPER, ["critic.url=http://127.0.0.1:9"]))
    assert not check.ok and "correct critic.url" in check.message
    assert "expected http" in pre.check_judge(load_scale(PAPER, ["critic.kind=base_model"])).message
