"""What the exceptions of Modal's SDK mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hermitcrab.backends.clouds.retry import Failure, meant
from hermitcrab.errors import BackendUnavailable, ConfigError, SandboxLost, SandboxStartError

NAME = "modal"
GET_TOKEN = (
    "Run `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET (https://modal.com/settings)."
)


def understood(error: Exception) -> Failure:
    return meant(error, meanings, _failed)


def meanings() -> Mapping[type[BaseException], Callable[[Any], Failure]]:
    """What each exception means that the SDK, or what it is built on, may raise.

    The SDK itself tries again, three times or more, what fails for a moment or is rate-limited with
    a time to wait, and a repeated call has no second effect: what it raises then is final.
    """
    from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
    from modal import exception, mount

    return {
        exception.AuthError: _refused_token,
        exception.InvalidError: lambda error: Failure(ConfigError(f"Modal: {error}", backend=NAME)),
        exception.ConflictError: _told,
        exception.ResourceExhaustedError: partial(_told, refused=True),
        exception.SandboxTimeoutError: _lost,
        exception.SandboxTerminatedError: _lost,
        exception.Error: _told,
        exception.ModuleNotMountable: _told,
        mount.NonLocalMountError: _told,
        GRPCError: _told,
        ProtocolError: _told,
        StreamTerminatedError: partial(_told, passing=True),
        OSError: partial(_told, passing=True),
    }


def _told(error: Exception, *, passing: bool = False, refused: bool = False) -> Failure:
    return Failure(_failed(_words(error)), passing=passing, refused=refused)


def _lost(error: Exception) -> Failure:
    return Failure(SandboxLost(f"Modal: {_words(error)}", backend=NAME))


def _refused_token(error: Exception) -> Failure:
    return Failure(
        BackendUnavailable(f"Modal did not take the token ({error}).", hint=GET_TOKEN, backend=NAME)
    )


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _failed(words: str) -> SandboxStartError:
    return SandboxStartError(f"Modal: {words}", backend=NAME)
