"""A server that speaks SGLang 0.5.12's HTTP protocol around a small transformers model.

`/generate` with `input_ids` and without a tokenizer, `/update_weights_from_disk`, the memory
routes. Sampling depends on prompt, seed and position alone, as SGLang's deterministic mode does.
"""

from __future__ import annotations

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.http_fakes import QuietHandler


class FakeSGLang:
    """Use as a context manager; `url`, and counters of what it was asked."""

    def __init__(self, model: Any, eos: int) -> None:
        self.model = model
        self.eos = eos
        self.version = "default"
        self.asleep = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fail_next: list[int] = []
        """Status codes to answer the next requests with, first first."""
        self.cached: set[tuple[int, ...]] = set()
        self._lock = threading.Lock()
        fake = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(length) or b"{}")
                status, answer = fake.answer(self.path, body)
                self.send(status, b"" if answer is None else json.dumps(answer).encode())

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeSGLang:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with self._lock:
            self.calls.append((path, body))
            if self.fail_next:
                return self.fail_next.pop(0), {"error": {"message": "out of order"}}
            if path == "/generate":
                if self.asleep:
                    return 500, {"error": {"message": "memory is released"}}
                return 200, self._generate(body)
            if path == "/update_weights_from_disk":
                weights = load_file(Path(body["model_path"]) / "model.safetensors")
                self.model.load_state_dict(weights, strict=False)
                self.version = body["weight_version"]
                return 200, {"success": True, "message": "Succeeded to update model weights."}
            if path in ("/release_memory_occupation", "/resume_memory_occupation"):
                self.asleep = path.startswith("/release")
                return 200, None
            return 404, {"detail": "Not Found"}

    def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        ids = list(body["input_ids"])
        start = body.get("logprob_start_len", -1)
        prompt = tuple(ids)
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "cached_tokens": len(ids) - 1 if prompt in self.cached else 0,
            "weight_version": self.version,
            "finish_reason": {"type": "length", "length": params["max_new_tokens"]},
        }
        if body.get("return_logprob") and start >= 0:
            meta["input_token_logprobs"] = self._input_logprobs(ids, start)
        self.cached.add(prompt)
        output: list[list[Any]] = []
        for _ in range(params["max_new_tokens"]):
            token, logprob = self._sample(ids, params)
            output.append([logprob, token, None])
            ids.append(token)
            stops = params.get("stop_token_ids", [self.eos])
            if token in stops and not params.get("ignore_eos"):
                meta["finish_reason"] = {"type": "stop", "matched": token}
                break
        meta["output_token_logprobs"] = output
        return {"output_ids": [entry[1] for entry in output], "meta_info": meta}

    def _sample(self, ids: list[int], params: dict[str, Any]) -> tuple[int, float]:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        temperature = params.get("temperature", 1.0)
        if temperature == 0:
            logprobs = torch.log_softmax(logits, -1)
            token = int(logprobs.argmax())
        else:
            logprobs = torch.log_softmax(logits / temperature, -1)
            seed = (params.get("sampling_seed") or 42) * 1_000_003 + len(ids)
            generator = torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
        return token, float(logprobs[token])

    def _input_logprobs(self, ids: list[int], start: int) -> list[list[Any]]:
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0].float()
        logprobs = torch.log_softmax(logits, -1)
        entries: list[list[Any]] = [[None, ids[start], None]]
        for position in range(start + 1, len(ids)):
            token = ids[position]
            entries.append([float(logprobs[position - 1, token]), token, None])
        return entries
