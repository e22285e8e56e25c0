"""HTTP to a gateway: one request at a time, its time limits, what its errors mean."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from hermitcrab.backends.clouds.retry import PASSING_STATUSES, Failure
from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxError, SandboxStartError
from hermitcrab.gateway.wire import EXTENSIONS

# It takes a while to import.
if TYPE_CHECKING:
    import httpx

CONNECT = ("HERMITCRAB_GATEWAY_CONNECT_SECONDS", 1.0)
POLL = ("HERMITCRAB_GATEWAY_POLL_SECONDS", 5.0)
CANCEL = ("HERMITCRAB_GATEWAY_CANCEL_SECONDS", 5.0)
"""Variables, and what holds when they say nothing that can be used."""
CREATE_SECONDS = TERMINATE_SECONDS = 60.0
START_SECONDS = 10.0
INSTALL = "Install what it needs: pip install 'hermitcrab[gateway-client]'."
_REFUSED = frozenset({408, 425, 429})
"""The request had no effect, and may have one in a moment."""
_GONE = frozenset({404, 410})
_SHOWN = 500


class Refusal(Exception):
    """An answer with another status than 2xx."""

    def __init__(self, status: int, words: str, retry_after: float | None) -> None:
        super().__init__(words)
        self.status, self.retry_after = status, retry_after

    @property
    def gone(self) -> bool:
        return self.status in _GONE

    @property
    def without_effect(self) -> bool:
        return self.status in _REFUSED

    @property
    def passing(self) -> bool:
        return self.status in PASSING_STATUSES


class Unclear(Exception):
    """No answer came, or none that can be read: what the request did is not known."""

    def __init__(self, words: str, *, sent: bool = True) -> None:
        super().__init__(words)
        self.sent = sent


def seconds(environ: Mapping[str, str], setting: tuple[str, float]) -> float:
    """A time limit from its variable; what is no number above 0 means the default."""
    name, default = setting
    try:
        value = float(environ.get(name, ""))
    except ValueError:
        return default
    return value if math.isfinite(value) and value > 0 else default


def missing() -> str:
    """What has to be installed; empty when nothing has."""
    return "" if importlib.util.find_spec("httpx") else "the Python package httpx is not installed"


class Http:
    """One gateway, as one of its users."""

    def __init__(self, url: str, token: str, environ: Mapping[str, str]) -> None:
        import httpx

        self._connect = seconds(environ, CONNECT)
        self.poll_seconds = seconds(environ, POLL)
        self.cancel_seconds = seconds(environ, CANCEL)
        self.extended = False
        """It is one of ours, and can more than the fixed calls."""
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {token}"} if token else {},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=30),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        read: float,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """The answer to a request, an object; raises Refusal or Unclear."""
        content = None if body is None else json.dumps(body, ensure_ascii=True).encode()
        kind = {"content-type": "application/json"} if content is not None else {}
        async with self.stream(
            method, path, read=read, content=content, headers={**kind, **(headers or {})}, params=params
        ) as answer:
            return _object(await _whole(answer))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        path: str,
        *,
        read: float,
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """A good answer that is still to be read; raises Refusal or Unclear, within the block too."""
        import httpx

        limits = httpx.Timeout(read, connect=self._connect, pool=None)
        try:
            async with self._client.stream(
                method, self.url + path, content=content, headers=headers, params=params, timeout=limits
            ) as answer:
                self.extended = self.extended or EXTENSIONS in answer.headers
                if not answer.is_success:
                    await answer.aread()
                    raise Refusal(answer.status_code, words(answer), _retry_after(answer.headers))
                yield answer
        except httpx.InvalidURL as error:
            raise ConfigError(f"url: got {self.url!r}: {error}") from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise Unclear(self._unreachable(error), sent=False) from error
        except httpx.HTTPError as error:
            raise Unclear(f"{self.url} did not answer as expected ({_named(error)})") from error

    def _unreachable(self, error: Exception) -> str:
        return f"{self.url} cannot be reached ({_named(error)})"


async def _whole(answer: httpx.Response) -> bytes:
    return await answer.aread()


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data) if data.strip() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Unclear(f"the gateway answered with something else than an object: {data[:80]!r}")
    return value


def words(answer: httpx.Response) -> str:
    """What is wrong, for people: `error`, else `message`, else `code`, else the body, else the status."""
    try:
        told = json.loads(answer.content)
    except ValueError:
        told = None
    if isinstance(told, dict):
        for key in ("error", "message", "code"):
            if text := _text(told.get(key)):
                return text
    body = answer.content.decode(errors="replace").strip()
    return _readable(body) or f"HTTP {answer.status_code}"


def _text(value: object) -> str:
    """Some say more in an object of their own."""
    if isinstance(value, dict):
        return next(filter(None, (_text(value.get(key)) for key in ("message", "error", "code"))), "")
    return _readable(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else ""


def _readable(text: str) -> str:
    """A stranger's words, without what a terminal would obey."""
    return "".join(each if each.isprintable() else " " for each in text[:_SHOWN]).strip()


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        value = float(headers.get("retry-after", ""))
    except ValueError:
        return None
    return value if 0 <= value < math.inf else None


def _named(error: Exception) -> str:
    return str(error) or type(error).__name__


def understood(error: Exception, backend: str) -> Failure:
    """What an error means for a call that may be repeated."""
    match error:
        case SandboxError():
            return Failure(error)
        case Refusal(status=401 | 403):
            hint = "Give it a token that it knows: `token`, or make one with `hermitcrab token create`."
            return Failure(
                BackendUnavailable(f"the gateway refused us: {error}.", hint=hint, backend=backend)
            )
        case Refusal():
            return Failure(
                SandboxStartError(f"the gateway refused: {error}", backend=backend),
                passing=error.passing and not error.without_effect,
                refused=error.without_effect,
                retry_after=error.retry_after,
            )
        case Unclear(sent=False):
            hint = "Is it running there? Its address is the setting `url`."
            return Failure(BackendUnavailable(f"{error}.", hint=hint, backend=backend), refused=True)
        case Unclear():
            return Failure(SandboxStartError(str(error), backend=backend), passing=True)
    return Failure(SandboxStartError(f"{type(error).__name__}: {error}", backend=backend))
