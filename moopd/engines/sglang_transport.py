"""Two ways to SGLang 0.5.12: an engine inside this process, or a server over HTTP.

Both speak the same requests: the JSON body of SGLang's `/generate` with `input_ids`.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx

from moopd.engines.base import EngineError
from moopd.http_client import RETRIED_STATUS, Tries

T = TypeVar("T")
Body = dict[str, Any]
NamedTensors = Iterable[tuple[str, Any]]

_DEAD = "a worker of SGLang died (its log says why); run the step again with a fresh engine"
CONTROL_TIMEOUT_S = 300.0
"""For weight and memory calls; sampling may take as long as it takes."""
_BUCKET_BYTES = 512 << 20


class Transport(Protocol):
    """How requests reach SGLang. Every method raises EngineError when it is gone."""

    reports_versions: bool
    """Whether answers name the weights they were sampled from: only a server can be replaced
    behind our back."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop that `generate` belongs to."""
        ...

    async def generate(self, body: Body) -> Body: ...

    def load_folder(self, folder: Path, version: str) -> None: ...

    def load_tensors(self, tensors: NamedTensors, version: str) -> None: ...

    def release(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class HttpTransport:
    """A running `sglang.launch_server --skip-tokenizer-init`; retries what may pass by itself."""

    reports_versions = True

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 600.0,
        max_retries: int = 3,
        backoff_s: float = 0.5,
        max_connections: int = 1024,
        weights_dir: str | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._tries = Tries(max_retries + 1, backoff_s)
        self._weights_dir = weights_dir
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(
            base_url=self._url,
            timeout=httpx.Timeout(timeout_s, connect=10.0, pool=None),
            limits=httpx.Limits(
                max_connections=max_connections, max_keepalive_connections=max_connections
            ),
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run_until_complete(work)

    async def generate(self, body: Body) -> Body:
        return await self._post("/generate", body)

    def load_folder(self, folder: Path, version: str) -> None:
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        self._succeed("/update_weights_from_disk", body)

    def load_tensors(self, tensors: NamedTensors, version: str) -> None:
        """Through a file that the server can read: it must see `weights_dir` too."""
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="weights-", dir=self._weights_dir) as folder:
            save_file(
                {name: tensor.detach().contiguous() for name, tensor in tensors},
                Path(folder) / "model.safetensors",
            )
            self.load_folder(Path(folder), version)

    def release(self) -> None:
        self.run(self._post("/release_memory_occupation", {"tags": ["kv_cache"]}))

    def resume(self) -> None:
        self.run(self._post("/resume_memory_occupation", {"tags": ["kv_cache"]}))

    def close(self) -> None:
        if not self._loop.is_closed():
            self.run(self._client.aclose())
            self._loop.close()

    def _succeed(self, path: str, body: Body) -> None:
        answer = self.run(self._post(path, body))
        if not answer.get("success"):
            raise EngineError(f"{self._url}{path}: {answer.get('message', answer)}")

    async def _post(self, path: str, body: Body) -> Body:
        cause = ""
        for wait in self._tries.waits():
            await asyncio.sleep(wait)
            try:
                response = await self._client.post(path, json=body)
            except httpx.TransportError as error:
                cause = f"{type(error).__name__}: {error}"
                continue
            if response.status_code in RETRIED_STATUS:
                cause = f"status {response.status_code}: {response.text[:200]}"
                continue
            return self._body(path, response)
        raise EngineError(
            f"{self._url}{path} failed {self._tries.max_tries} times, last with {cause}; "
            "restart the server, then run the step again"
        )

    def _body(self, path: str, response: httpx.Response) -> Body:
        if response.status_code >= 400:
            raise EngineError(
                f"{self._url}{path} refused the request with status {response.status_code}: "
                f"{response.text[:500]}"
            )
        # SGLang answers its memory routes with an empty body.
        value = response.json() if response.content else {}
        return value if isinstance(value, dict) else {}


class InProcessTransport:
    """`sglang.Engine` in this process, its workers beside it; one GPU shared with the trainer."""

    reports_versions = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._dead = False
        engine.loop.run_until_complete(self._attach())

    @classmethod
    def start(cls, model_path: str, options: Mapping[str, Any]) -> InProcessTransport:
        import sglang

        try:
            return cls(sglang.Engine(model_path=model_path, skip_tokenizer_init=True, **options))
        except RuntimeError as error:
            raise EngineError(
                f"SGLang did not start on {model_path}: {error}; see its log above"
            ) from error

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        loop: asyncio.AbstractEventLoop = self._engine.loop
        try:
            with self._watched(timeout_s=None):
                return loop.run_until_complete(work)
        finally:
            work.close()

    async def generate(self, body: Body) -> Body:
        answer: Body = await self._guard(self._engine.async_generate(**body))
        return answer

    def load_folder(self, folder: Path, version: str) -> None:
        with self._watched():
            self._check(self._engine.update_weights_from_disk(str(folder)))

    def load_tensors(self, tensors: NamedTensors, version: str) -> None:
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        for bucket, last in _mark_last(_buckets(tensors, _BUCKET_BYTES)):
            flat = FlattenedTensorBucket(named_tensors=bucket)
            content = {
                "flattened_tensor": flat.get_flattened_tensor(),
                "metadata": flat.get_metadata(),
            }
            packed = MultiprocessingSerializer.serialize(content, output_str=True)
            with self._watched():
                outcome = self._engine.update_weights_from_tensor(
                    [packed] * self._engine.server_args.tp_size,
                    load_format="flattened_bucket",
                    flush_cache=last,
                )
            self._check(outcome)

    def release(self) -> None:
        with self._watched():
            self._engine.release_memory_occupation(tags=["kv_cache"])

    def resume(self) -> None:
        with self._watched():
            self._engine.resume_memory_occupation(tags=["kv_cache"])

    def close(self) -> None:
        self._engine.shutdown()

    @contextmanager
    def _watched(self, timeout_s: float | None = CONTROL_TIMEOUT_S) -> Iterator[None]:
        """The death of a worker, or no reply at all, ends what waits for it, as an EngineError.

        SGLang's own handler would end this process too, and its control calls would wait forever.
        """
        if self._dead:
            raise EngineError(_DEAD)
        loop = self._engine.loop
        alarm = None if timeout_s is None else loop.call_later(timeout_s, loop.stop)
        try:
            yield
        except RuntimeError as error:
            if self._dead:
                raise EngineError(_DEAD) from error
            if alarm is not None and alarm.when() <= loop.time():
                raise EngineError(
                    f"SGLang did not reply in {timeout_s:.0f} s; run the step again with a fresh "
                    "engine"
                ) from error
            raise
        finally:
            if alarm is not None:
                alarm.cancel()

    async def _attach(self) -> None:
        """Start SGLang's reader of replies here: outside its own loop it would wait elsewhere."""
        self._engine.tokenizer_manager.auto_create_handle_loop()
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGQUIT, self._die)

    def _die(self) -> None:
        self._dead = True
        self._engine.loop.stop()

    async def _guard(self, work: Coroutine[Any, Any, Body]) -> Body:
        try:
            return await work
        except (RuntimeError, OSError, ValueError) as error:
            raise EngineError(
                f"SGLang failed on a request with {type(error).__name__}: {error}; "
                "run the step again with a fresh engine"
            ) from error

    @staticmethod
    def _check(outcome: tuple[Any, ...]) -> None:
        success, message, *_ = outcome
        if not success:
            raise EngineError(f"SGLang took no weights: {message}")


def _buckets(tensors: NamedTensors, max_bytes: int) -> Iterator[list[tuple[str, Any]]]:
    bucket: list[tuple[str, Any]] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


def _mark_last(items: Iterable[T]) -> Iterator[tuple[T, bool]]:
    waiting: list[T] = []
    for item in items:
        if waiting:
            yield waiting.pop(), False
        waiting.append(item)
    if waiting:
        yield waiting.pop(), True
