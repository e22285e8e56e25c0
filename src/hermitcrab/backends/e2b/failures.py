"""What the exceptions of E2B's SDK mean."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from hermitcrab.backends.clouds.retry import PASSING_STATUSES, Failure, meant
from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxLost, SandboxStartError

T = TypeVar("T")

NAME = "e2b"
KEY = "E2B_API_KEY"
GET_KEY = f"Set {KEY} to a key from https://e2b.dev/dashboard?tab=keys."
_TRIED_BY_THE_SDK = frozenset({429, 502, 503, 504})
_UNDER_WAY = 409
"""The first attempt at the same creation may have been heard, and not be over."""


class NotTaken(Exception):
    """A sandbox's own interface turned a call down before anything happened; the SDK did not try again."""


async def distinguished(call: Callable[[], Awaitable[T]]) -> T:
    """The call, with a rate limit of the sandbox's own as what it is."""
    from e2b import RateLimitException

    try:
        return await call()
    except RateLimitException as error:
        raise NotTaken(str(error)) from error


def understood(error: Exception) -> Failure:
    return meant(error, meanings, _failed)


def meanings() -> Mapping[type[BaseException], Callable[[Any], Failure]]:
    """What each exception means that the SDK, or what it is built on, may raise.

    The SDK itself tries again, three times, when the control plane is busy (`_TRIED_BY_THE_SDK`); what it
    raises then is final.
    """
    import connectrpc.errors
    import httpx
    import pyqwest
    from e2b import exceptions
    from e2b.api.client.errors import UnexpectedStatus

    passing = partial(_told, passing=True)
    return {
        NotTaken: partial(_told, refused=True),
        exceptions.AuthenticationException: _refused_key,
        exceptions.InvalidArgumentException: lambda error: Failure(
            ConfigError(f"E2B: {error}", backend=NAME)
        ),
        exceptions.SandboxNotRunningException: _lost,
        exceptions.SandboxNotFoundException: _lost,
        exceptions.GuestUnresponsiveException: _lost,
        exceptions.TimeoutException: passing,
        exceptions.RateLimitException: _told,
        exceptions.ServiceBusyException: _told,
        exceptions.SandboxException: _by_status,
        exceptions.BuildException: _told,
        exceptions.VolumeException: _told,
        exceptions.SecretException: _told,
        UnexpectedStatus: _by_status,
        connectrpc.errors.ConnectError: passing,
        httpx.HTTPError: passing,
        pyqwest.ReadError: passing,
        pyqwest.WriteError: passing,
        pyqwest.StreamError: passing,
        # An error page in place of an answer.
        json.JSONDecodeError: passing,
        OSError: passing,
    }


def _told(error: Exception, *, passing: bool = False, refused: bool = False) -> Failure:
    return Failure(_failed(str(error) or type(error).__name__), passing=passing, refused=refused)


def _by_status(error: Any) -> Failure:
    """The control plane has an HTTP status, a sandbox's own interface a code beneath the exception."""
    from connectrpc.code import Code
    from connectrpc.errors import ConnectError

    told_by = error.__context__
    if isinstance(told_by, ConnectError):
        return _told(error, passing=told_by.code in (Code.INTERNAL, Code.UNKNOWN, Code.ABORTED))
    return _told(error, passing=error.status_code in {_UNDER_WAY, *PASSING_STATUSES} - _TRIED_BY_THE_SDK)


def _lost(error: Exception) -> Failure:
    return Failure(SandboxLost(f"E2B: {error}", backend=NAME))


def _refused_key(error: Exception) -> Failure:
    from connectrpc.errors import ConnectError

    if isinstance(error.__context__, ConnectError):
        # A sandbox's own interface, which the SDK has a token of its own for: it does not know the user.
        return Failure(ConfigError(f"E2B: {error}", backend=NAME))
    return Failure(BackendUnavailable(f"E2B refused the key in {KEY} ({error}).", hint=GET_KEY, backend=NAME))


def _failed(words: str) -> SandboxStartError:
    return SandboxStartError(f"E2B: {words}", backend=NAME)
