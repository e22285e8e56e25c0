"""What the exceptions of Vercel's SDK mean."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hermitcrab.backends.clouds.retry import PASSING_STATUSES, Failure, meant, retry_after
from hermitcrab.backends.vercel.config import NAME
from hermitcrab.errors import BackendUnavailable, SandboxLost, SandboxStartError

TOKEN, TEAM, PROJECT = "VERCEL_TOKEN", "VERCEL_TEAM_ID", "VERCEL_PROJECT_ID"
OIDC, OIDC_FILE = "VERCEL_OIDC_TOKEN", "VERCEL_OIDC_TOKEN_FILE"
GET_TOKEN = (
    f"Set {TOKEN} to a token from https://vercel.com/account/settings/tokens, {TEAM} and {PROJECT}; "
    f"or {OIDC}, by `vercel link && vercel env pull`."
)
_STOPPED = "sandbox_stopped"
_CHANGING = frozenset({"sandbox_stopping", "sandbox_snapshotting", "sandbox_stream_closed"})
"""Codes of what is over in a moment."""


def understood(error: Exception) -> Failure:
    return meant(error, meanings, _failed)


def meanings() -> Mapping[type[BaseException], Callable[[Any], Failure]]:
    """What each exception means that the SDK, or what it is built on, may raise."""
    import anyio
    import httpx2
    from vercel import sandbox
    from vercel.oidc import VercelOidcTokenError
    from vercel.sandbox import SandboxTimeoutError

    passing = partial(_told, passing=True)
    return {
        sandbox.SandboxApiError: _by_status,
        sandbox.SandboxCredentialsError: _no_token,
        VercelOidcTokenError: _no_token,
        sandbox.SandboxStdinError: _input_failed,
        sandbox.SandboxStreamError: _by_code,
        sandbox.SandboxTerminalStateError: _told,
        # An error page in place of an answer, mostly.
        sandbox.SandboxResponseError: passing,
        SandboxTimeoutError: passing,
        sandbox.SandboxError: _told,
        httpx2.HTTPError: passing,
        httpx2.StreamError: passing,
        httpx2.InvalidURL: _told,
        anyio.BrokenResourceError: partial(_told, words="its input is closed"),
        anyio.ClosedResourceError: partial(_told, words="its input is closed"),
        OSError: passing,
    }


def _told(error: Exception, *, passing: bool = False, words: str = "") -> Failure:
    return Failure(_failed(str(error) or words or type(error).__name__), passing=passing)


def _by_status(error: Any) -> Failure:
    status = error.status_code
    if status in (401, 403):
        return Failure(
            BackendUnavailable(
                f"Vercel refused the token in {token_used()} ({error}).", hint=GET_TOKEN, backend=NAME
            )
        )
    if error.code in _CHANGING:
        return _told(error, passing=True)
    if status == 410:
        return _lost(error)
    return Failure(
        _failed(str(error)),
        passing=status in PASSING_STATUSES,
        refused=status == 429,
        retry_after=retry_after(error.response.headers.get("retry-after", "")),
    )


def _by_code(error: Any) -> Failure:
    return _lost(error) if error.code == _STOPPED else _told(error, passing=error.code in _CHANGING)


def _input_failed(error: Any) -> Failure:
    """The SDK has sent it again as often as is safe; what it raises then is final."""
    cause = understood(error.cause) if isinstance(error.cause, Exception) else _told(error)
    return Failure(cause.error)


def _lost(error: Exception) -> Failure:
    return Failure(SandboxLost(f"Vercel: {error}", backend=NAME))


def _no_token(error: Exception) -> Failure:
    return Failure(BackendUnavailable(f"Vercel: {error}.", hint=GET_TOKEN, backend=NAME))


def _failed(words: str) -> SandboxStartError:
    return SandboxStartError(f"Vercel: {words}", backend=NAME)


def token_used() -> str:
    """The SDK's own order."""
    return next((name for name in (OIDC, OIDC_FILE) if os.environ.get(name)), TOKEN)
