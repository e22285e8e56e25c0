"""Which of the host's variables a command gets: those that were named; on the host itself the harmless."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hermitcrab.convert import Unfit
from hermitcrab.core.dump import NOT_CAPTURED
from hermitcrab.core.farewell import PRIVATE
from hermitcrab.errors import ConfigError, HermitcrabWarning
from hermitcrab.policy.secrets import SecretPolicy

if TYPE_CHECKING:
    from hermitcrab.config import SessionConfig

_NOTHING: Mapping[str, str] = {}


def checked_names(value: object) -> tuple[str, ...]:
    """Names of variables, each once; `Unfit` says which one is none."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Unfit("takes a list of names")
    for number, name in enumerate(value):
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise Unfit(f"got {name!r}, takes names of variables (letters, digits and _)", str(number))
        if name in NOT_CAPTURED or name.startswith(PRIVATE):
            raise Unfit(f"got {name!r}, which is bash's own", str(number))
    return tuple(dict.fromkeys(value))


class EnvFile:
    """A `.env`, read again when it has changed. What is not there, or no longer, gives nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._values: Mapping[str, str] = _NOTHING

    def values(self) -> Mapping[str, str]:
        try:
            status = os.stat(self._path)
            seen = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
            if seen != self._seen:
                self._values, self._seen = self.read(), seen
        except (OSError, ValueError):
            self._values, self._seen = _NOTHING, None
        return self._values

    def read(self) -> Mapping[str, str]:
        """What it says now; OSError or ValueError when it cannot be read."""
        text = self._path.read_text(encoding="utf-8-sig", errors="surrogateescape")
        if "\0" in text:
            raise ValueError("it holds a NUL byte")
        # Imported here: it costs more than everything else at the start, and few have such a file.
        from dotenv import dotenv_values

        found = dotenv_values(stream=io.StringIO(text))
        return {name: value for name, value in found.items() if value is not None}


class Forwarding:
    """The injected layer: variables that each command is given as they are then, and that nobody keeps.

    A name is looked up in the host's environment, then in the `.env`, then in the session's `env`.
    """

    def __init__(self, config: SessionConfig, environ: Mapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._file = None if config.env_file is None else _checked_file(config.env_file)
        self._policy = policy_of(config)
        self._asked_for = frozenset(config.pass_through) - set(config.forward_env)
        names = dict.fromkeys((*config.forward_env, *filter(self._may_pass, config.pass_through)))
        self._names = tuple(names)
        self.names = frozenset(names)
        self._own = {name: value for name, value in config.env.items() if name in self.names}

    def values(self) -> Mapping[str, str]:
        if not self._names:
            return _NOTHING
        known = {**self._own, **(self._file.values() if self._file else _NOTHING)}
        found = {name: self._environ.get(name, known.get(name)) for name in self._names}
        return {name: value for name, value in found.items() if value is not None and self._may(name, value)}

    def _may(self, name: str, value: str) -> bool:
        return name not in self._asked_for or not self._policy.is_secret(name, value)

    def _may_pass(self, name: str) -> bool:
        """Whether a name may pass that a tool has asked for, and not the user."""
        if name not in self._asked_for or not self._policy.is_secret(name, self._environ.get(name, "")):
            return True
        warnings.warn(
            f"pass_through: {name} looks like a secret and is not passed; name it in forward_env if commands "
            "may have it, or in harmless_names if it is none",
            HermitcrabWarning,
            stacklevel=4,
        )
        return False


def policy_of(config: SessionConfig) -> SecretPolicy:
    return SecretPolicy(config.secret_names, config.harmless_names)


def _checked_file(path: Path) -> EnvFile:
    file = EnvFile(path)
    try:
        file.read()
    except (OSError, ValueError) as error:
        raise ConfigError(f"env_file: {path} cannot be read: {error}") from None
    return file


def inherited(config: SessionConfig, environ: Mapping[str, str]) -> dict[str, str]:
    """The host's environment without what looks like a secret, and without what its `.env` has brought in."""
    file = _NOTHING if config.env_file is None else EnvFile(config.env_file).values()
    policy = policy_of(config)
    return {
        name: value
        for name, value in environ.items()
        if policy.is_harmless(name) or not (policy.is_secret(name, value) or file.get(name) == value)
    }


def withheld(config: SessionConfig, environ: Mapping[str, str]) -> list[str]:
    """The names that `inherited` leaves out."""
    return sorted(environ.keys() - inherited(config, environ).keys())
