"""Asking a server over HTTP: pooled connections, bounded tries, doubling waits, named causes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
"""Answers that may pass by themselves; any other refusal stays one."""
_MAX_WAIT_S = 30.0
_HEADERS = {"content-type": "application/json"}


class NoAnswerError(RuntimeError):
    """No usable answer; the message names the address, the tries and the last cause."""


@dataclass(frozen=True, slots=True)
class Tries:
    """How often a request is made; waits between tries start at `backoff_s` and double."""

    max_tries: int = 5
    backoff_s: float = 0.25

    def waits(self) -> Iterator[float]:
        """Seconds before each try; none before the first."""
        yield 0.0
        for number in range(self.max_tries - 1):
            yield min(self.backoff_s * 2**number, _MAX_WAIT_S)


def address(url: str, what: str) -> httpx.URL:
    """`url` parsed. Raises ValueError, naming the setting `what`, where it is no HTTP address."""
    import httpx

    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ValueError(f"{what}: got {url!r} ({error}), expected http://HOST:PORT") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{what}: got {url!r}, expected http://HOST:PORT")
    return parsed


def open_client(url: httpx.URL, timeout_s: float, max_connections: int) -> httpx.Client:
    """A client for the host of `url`, usable from many threads; `timeout_s` counts for one try."""
    import httpx

    return httpx.Client(
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, 5.0), pool=None),
        limits=httpx.Limits(
            max_connections=max_connections, max_keepalive_connections=max_connections
        ),
        # A proxy of the environment must not come between this machine and itself.
        trust_env=not _is_loopback(url.host),
    )


def post(
    client: httpx.Client,
    url: httpx.URL,
    body: Mapping[str, Any],
    tries: Tries,
    read: Callable[[Any], T],
) -> T:
    """`read` of the first good answer's JSON; a ValueError of `read` makes it a bad one.

    Raises NoAnswerError at once for a refusal that no retry mends, else after the last try.
    """
    import httpx

    # Escaped to ASCII: text with half a surrogate pair is refused there, not fatal here.
    content = json.dumps(body).encode()
    cause = ""
    for wait in tries.waits():
        time.sleep(wait)
        try:
            response = client.post(url, content=content, headers=_HEADERS)
        except httpx.HTTPError as error:
            cause = f"{type(error).__name__}: {error}"
            continue
        if response.status_code == 200:
            try:
                return read(_decoded(response))
            except ValueError as error:
                cause = f"status 200 with {error}"
                continue
        cause = f"status {response.status_code}: {response.text[:300]}"
        if response.status_code not in RETRIED_STATUS:
            raise NoAnswerError(f"{url} refused the request: {cause}")
    raise NoAnswerError(f"{url} gave no answer in {tries.max_tries} tries; the last one: {cause}")


def failure(url: httpx.URL | str, timeout_s: float = 5.0) -> str | None:
    """Why `url` does not answer a plain GET with success; None where it does."""
    import httpx

    try:
        with open_client(httpx.URL(url), timeout_s, max_connections=1) as client:
            client.get(url).raise_for_status()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _decoded(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:
        raise ValueError(f"a body that is no JSON ({error})") from None


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
