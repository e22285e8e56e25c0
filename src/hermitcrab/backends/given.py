"""What backends do alike with what a user gave them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from hermitcrab.errors import ConfigError


class Forwarding(Protocol):
    """A config that names variables of the host for the commands in a sandbox."""

    @property
    def forward_env(self) -> Sequence[str]: ...


def forwarded(config: Forwarding) -> Mapping[str, str]:
    """The forwarded variables, as they are now."""
    return {name: os.environ[name] for name in config.forward_env if name in os.environ}


def refuse_variable_names(config: Forwarding, backend: str = "") -> None:
    for name in config.forward_env:
        if not (name.isascii() and name.isidentifier()):
            takes = "takes names of variables (letters, digits and _)"
            raise wrong("forward_env", name, takes, backend=backend)


def wrong(key: str, value: object, takes: str, *, backend: str = "") -> ConfigError:
    return ConfigError(f"{key}: got {str(value)!r}, {takes}", backend=backend)
