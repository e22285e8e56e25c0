"""What backends do alike with what a user gave them."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

from hermitcrab.backends import volumes
from hermitcrab.backends.volumes import Mount
from hermitcrab.core.protocols import Carried
from hermitcrab.errors import ConfigError


def carried_mounts(
    carried: Sequence[Carried], home: str, *, taken: Collection[str] = (), backend: str = ""
) -> list[Mount]:
    """What a session carries as mounts in a sandbox with that HOME. The user's own at a place come first."""
    if not carried:
        return []
    sockets = volumes.engine_sockets(os.environ, Path.home(), os.getuid())
    found = []
    for source, target in carried:
        place = home.rstrip("/") + target[1:] if target.startswith("~/") else target
        try:
            mount = volumes.checked(Mount(source, place, read_only=True), sockets)
        except ValueError as error:
            raise ConfigError(f"{source} cannot be carried: a mount {error}", backend=backend) from None
        if place not in taken:
            found.append(mount)
    return found


def wrong(key: str, value: object, takes: str, *, backend: str = "") -> ConfigError:
    return ConfigError(f"{key}: got {str(value)!r}, {takes}", backend=backend)
