"""The SGLang engine against a server that speaks its protocol.

Locked here: tokens in, tokens out; candidates share one prefill and differ by seed; a request's
tokens do not depend on its neighbours; failures are retried, then clear; a server that lost the
weights is noticed; scores and greedy samples equal a forward pass of the same model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moopd.config import EngineConfig, load_scale
from moopd.engines.base import EngineError
from moopd.engines.sglang import SGLangEngine, candidate_seed, server_options, start_sglang
from moopd.engines.sglang_transport import HttpTransport, InProcessTransport, _buckets, _mark_last
from moopd.types import CheckpointRef, GenerateRequest, ScoreRequest
from tests.engines.fake_sglang import FakeSGLang
from tests.support import tiny_policy, word_tokenizer

TOKENIZER = word_tokenizer()
EOS = TOKENIZER.eos_token_id
PROMPT = tuple(TOKENIZER.encode("who a red harbor", add_special_tokens=False))


@pytest.fixture()
def server() -> Iterator[FakeSGLang]:
    with FakeSGLang(tiny_policy(TOKENIZER), EOS) as fake:
        yield fake


@pytest.fixture()
def engine(server: FakeSGLang) -> Iterator[SGLangEngine]:
    transport = HttpTransport(server.url, max_retries=2, backoff_s=0.0)
    started = SGLangEngine(transport, TOKENIZER.decode, EOS)
    yield started
    started.close()


def request(**changes: object) -> GenerateRequest:
    values: dict[str, object] = {
        "prompt_ids": PROMPT,
        "num_candidates": 1,
        "max_tokens": 6,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 7,
    }
    return GenerateRequest(**{**values, **changes})  # type: ignore[arg-type]


def forward_logprobs(
    fake: FakeSGLang, prompt: tuple[int, ...], ids: tuple[int, ...]
) -> list[float]:
    with torch.no_grad():
        logits = fake.model(input_ids=torch.tensor([[*prompt, *ids]])).logits[0].float()
    table = torch.log_softmax(logits, -1)
    return [float(table[len(prompt) - 1 + k, token]) for k, token in enumerate(ids)]


def test_sampled_ids_and_their_logprobs_come_back_as_they_were_sampled(
    server: FakeSGLang, engine: SGLangEngine
) -> None:
    [[completion]] = engine.generate([request()])
    assert 1 <= len(completion.token_ids) <= 6
    assert completion.finish == ("stop" if completion.token_ids[-1] == EOS else "length")
    assert list(completion.logprobs) == pytest.approx(
        forward_logprobs(server, PROMPT, completion.token_ids), abs=1e-6
    )
    assert completion.text == TOKENIZER.decode(completion.token_ids)


def test_a_request_does_not_depend_on_its_neighbours(engine: SGLangEngine) -> None:
    alone = engine.generate([request(seed=11)])
    crowd = engine.generate([request(seed=3), request(seed=11, num_candidates=1), request(seed=4)])
    assert crowd[1] == alone[0]


def test_candidates_differ_and_their_prompt_is_prefilled_once(
    server: FakeSGLang, engine: SGLangEngine
) -> None:
    long_prompt = PROMPT * 20
    [candidates] = engine.generate([request(prompt_ids=long_prompt, num_candidates=5)])
    assert len({c.token_ids for c in candidates}) > 1
    bodies = [body for path, body in server.calls if path == "/generate"]
    # One request without output warms the prefix, then five sample behind it.
    assert [body["sampling_params"]["max_new_tokens"] for body in bodies] == [0, 6, 6, 6, 6, 6]
    seeds = [body["sampling_params"]["sampling_seed"] for body in bodies[1:]]
    assert sorted(seeds) == sorted(candidate_seed(7, c) for c in range(5))
    assert candidate_seed(7, 0) == 7


def test_scores_are_those_of_a_forward_pass(server: FakeSGLang, engine: SGLangEngine) -> None:
    ids = tuple(TOKENIZER.encode("x y z", add_special_tokens=False))
    [scores] = engine.score([ScoreRequest(PROMPT, ids)])
    assert list(scores) == pytest.approx(forward_logprobs(server, PROMPT, ids), abs=1e-6)


def test_a_passing_failure_is_retried_and_a_lasting_one_is_an_engine_error(
    server: FakeSGLang, engine: SGLangEngine
) -> None:
    server.fail_next = [503, 500]
    [[completion]] = engine.generate([request()])
    assert completion.token_ids
    server.fail_next = [503, 503, 503]
    with pytest.raises(EngineError, match=r"failed 3 times, last with status 503.*run the step"):
        engine.generate([request()])


def test_a_refused_request_is_not_retried(server: FakeSGLang, engine: SGLangEngine) -> None:
    server.fail_next = [400]
    with pytest.raises(EngineError, match="refused the request with status 400"):
        engine.generate([request()])
    assert len(server.calls) == 1


def test_a_dead_server_is_an_engine_error() -> None:
    transport = HttpTransport("http://127.0.0.1:9", max_retries=1, backoff_s=0.0)
    engine = SGLangEngine(transport, TOKENIZER.decode, EOS)
    with pytest.raises(EngineError, match=r"ConnectError.*restart the server"):
        engine.generate([request()])
    engine.close()


def test_weights_change_without_restart_and_a_restarted_server_is_noticed(
    server: FakeSGLang, engine: SGLangEngine, tmp_path: Path
) -> None:
    before = engine.generate([request(temperature=0.0)])
    other = tiny_policy(TOKENIZER, seed=5)
    other.save_pretrained(tmp_path)
    engine.load_weights(CheckpointRef("cmas_rl", 20, str(tmp_path), "f" * 64))
    after = engine.generate([request(temperature=0.0)])
    assert before[0][0].logprobs != after[0][0].logprobs
    assert server.version == "cmas_rl-20-" + "f" * 16
    server.version = "default"  # what a restarted server reports
    with pytest.raises(EngineError, match="samples from weights 'default', expected 'cmas_rl-20"):
        engine.generate([request()])


def test_the_trainers_weights_reach_a_server_through_a_folder(
    server: FakeSGLang, engine: SGLangEngine
) -> None:
    trained = tiny_policy(TOKENIZER, seed=5)
    engine.update_weights(trained.named_parameters())
    [[completion]] = engine.generate([request(temperature=0.0)])
    with torch.no_grad():
        logits = trained(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    assert completion.logprobs[0] == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-6)
    assert server.version == "update-1"


def test_memory_is_released_for_updates_and_taken_back_by_the_next_request(
    server: FakeSGLang, engine: SGLangEngine
) -> None:
    engine.sleep()
    engine.sleep()
    assert server.asleep
    assert engine.generate([request()])[0][0].token_ids
    memory_calls = [path for path, _ in server.calls if "memory" in path]
    assert memory_calls == ["/release_memory_occupation", "/resume_memory_occupation"]


def test_an_aborted_request_and_missing_tokens_are_errors(engine: SGLangEngine) -> None:
    with pytest.raises(EngineError, match="expected stop or length"):
        engine._completion({"meta_info": {"finish_reason": {"type": "abort"}}})
    with pytest.raises(EngineError, match="returned 0 tokens"):
        engine._completion({"meta_info": {"finish_reason": {"type": "stop"}}})


def test_options_of_a_server_and_of_this_process_are_kept_apart() -> None:
    config = EngineConfig(
        kind="sglang", url="http://127.0.0.1:1", options={"mem_fraction_static": 1}
    )
    with pytest.raises(ValueError, match=r"\['mem_fraction_static'\] belong to a server"):
        start_sglang(config, "", TOKENIZER.decode, EOS)
    options = server_options({"deterministic": False, "share_memory": True, "tp_size": 2})
    assert options["enable_deterministic_inference"] is False
    assert options["enable_memory_saver"] is True
    assert options["tp_size"] == 2
    assert "share_memory" not in options


class FakeInProcess:
    """`sglang.Engine` as far as `InProcessTransport` uses it, with its habits about event loops.

    Replies are read by a task of whichever loop runs when the reader is first asked for; started
    outside a running loop it belongs to a loop that nobody runs, and every call waits forever.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = self
        self.reader: asyncio.Task[None] | None = None
        self.waiting: list[asyncio.Future[str]] = []
        self.dies = False

    def auto_create_handle_loop(self) -> None:
        if self.reader is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                loop = asyncio.new_event_loop()
            self.reader = loop.create_task(self.read())

    async def read(self) -> None:
        while True:
            await asyncio.sleep(0)
            while self.waiting:
                self.waiting.pop().set_result("done")

    async def reply(self) -> None:
        self.auto_create_handle_loop()
        if self.dies:
            os.kill(os.getpid(), signal.SIGQUIT)
            await asyncio.sleep(60)
        self.waiting.append(asyncio.get_running_loop().create_future())
        await asyncio.wait_for(self.waiting[-1], timeout=2)

    async def async_generate(self, **body: object) -> dict[str, object]:
        await self.reply()
        entries = [[-0.5, 3, None], [-0.25, 4, None]]
        return {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": entries}}

    def update_weights_from_disk(self, path: str) -> tuple[bool, str]:
        self.loop.run_until_complete(self.reply())
        return True, path

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.loop.run_until_complete(self.reply())

    def shutdown(self) -> None:
        assert self.reader is not None
        self.reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.reader)
        self.loop.close()


def test_control_calls_before_the_first_request_get_their_replies() -> None:
    engine = SGLangEngine(InProcessTransport(FakeInProcess()), TOKENIZER.decode, EOS)
    engine.load_weights(CheckpointRef("base", 0, "somewhere", "0" * 64))
    engine.sleep()
    engine._asleep = False
    [[completion]] = engine.generate([request()])
    assert completion.token_ids == (3, 4)
    engine.close()


def test_a_control_call_without_reply_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeInProcess()
    transport = InProcessTransport(fake)
    monkeypatch.setattr(fake, "reply", lambda: asyncio.sleep(60))
    with (
        pytest.raises(EngineError, match="did not reply in 0 s"),
        transport._watched(timeout_s=0.02),
    ):
        fake.release_memory_occupation(["kv_cache"])


def test_a_dead_worker_in_this_process_is_an_engine_error_not_the_end_of_it() -> None:
    fake = FakeInProcess()
    engine = SGLangEngine(InProcessTransport(fake), TOKENIZER.decode, EOS)
    fake.dies = True
    with pytest.raises(EngineError, match="a worker of SGLang died"):
        engine.load_weights(CheckpointRef("base", 0, "somewhere", "0" * 64))
    with pytest.raises(EngineError, match="a worker of SGLang died"):
        engine.generate([request()])


def test_weights_travel_in_buckets_and_the_last_one_flushes() -> None:
    tensors = [(name, torch.zeros(100, dtype=torch.float32)) for name in "abcde"]
    buckets = list(_mark_last(_buckets(tensors, max_bytes=800)))  # 400 bytes each: two a bucket
    assert [([n for n, _ in bucket], last) for bucket, last in buckets] == [
        (["a", "b"], False),
        (["c", "d"], False),
        (["e"], True),
    ]


def test_the_graph_sizes_of_scale_small_reach_sglang_as_a_list() -> None:
    scale = load_scale(Path(__file__).parents[2] / "configs" / "scale" / "small.yaml")
    sizes = server_options(scale.engine.options)["cuda_graph_bs"]
    # SGLang adds to the list; the largest covers every live workflow of an evaluation.
    assert isinstance(sizes, list)
    assert sizes == sorted(set(sizes)) and sizes[-1] >= scale.evaluation.max_live_workflows
