"""What the exceptions of microsandbox's SDK and the complaints of its command mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hermitcrab.backends.clouds.retry import Failure, meant
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    SandboxLost,
    SandboxStartError,
    UnsupportedCapability,
)

NAME = "microsandbox"
INSTALL = "Install it: pip install 'hermitcrab[microsandbox]'; or have msb on PATH, or its path in MSB_PATH."
TAKEN = "already exists"
_GONE = re.compile(r"sandbox not found|sandbox (is )?not running|was replaced")
_WRONG = re.compile(r"invalid config")
_PASSING = re.compile(
    r"error sending request|connection (refused|reset|closed)|timed? ?out|database is locked|"
    rf"\b(408|425|429|50\d)\b|{TAKEN}|selected msb runtime does not support"
)
"""A registry out of reach or busy, another program that has the catalogue or made the same VM, or a machine
so busy that `msb` did not say its version in time, which the SDK takes for that of an old one."""


class Refused(Exception):
    """What `msb` said when it failed."""


def understood(error: Exception) -> Failure:
    return meant(error, meanings, _failed)


def meanings() -> Mapping[type[BaseException], Callable[[Any], Failure]]:
    """What each exception means that the SDK or the command may cause."""
    known: dict[type[BaseException], Callable[[Any], Failure]] = {Refused: _by_words, OSError: _told}
    try:
        from microsandbox import errors
    except ImportError:
        return known
    return {
        **known,
        errors.MicrosandboxError: _by_words,
        errors.SandboxNotFoundError: _lost,
        errors.SandboxNotRunningError: _lost,
        errors.SandboxReplacedError: _lost,
        errors.RuntimeNotInstalledError: _unavailable,
        errors.RuntimeIncompleteError: _unavailable,
        errors.InvalidConfigError: _wrong,
        errors.NetworkPolicyError: _wrong,
        errors.NoDefaultCommandError: _wrong,
        errors.UnsupportedError: _unsupported,
        errors.UnsupportedOperationError: _unsupported,
    }


def _by_words(error: Exception) -> Failure:
    words = str(error)
    if _GONE.search(words):
        return _lost(error)
    if _WRONG.search(words):
        return _wrong(error)
    return Failure(_failed(words or type(error).__name__), passing=bool(_PASSING.search(words)))


def _told(error: Exception) -> Failure:
    return Failure(_failed(str(error)))


def _lost(error: Exception) -> Failure:
    return Failure(SandboxLost(f"microsandbox: {error}", backend=NAME))


def _wrong(error: Exception) -> Failure:
    return Failure(ConfigError(f"microsandbox: {error}", backend=NAME))


def _unsupported(error: Exception) -> Failure:
    told = UnsupportedCapability(f"microsandbox: {error}", backend=NAME)
    return Failure(told, passing=bool(_PASSING.search(str(error))))


def _unavailable(error: Exception) -> Failure:
    return Failure(BackendUnavailable(f"microsandbox: {error}.", hint=INSTALL, backend=NAME))


def _failed(words: str) -> SandboxStartError:
    return SandboxStartError(f"microsandbox: {words}", backend=NAME)
