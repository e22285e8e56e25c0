"""The settings of a sandbox at Daytona."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.backends.daytona.failures import NAME
from hermitcrab.backends.given import wrong
from hermitcrab.errors import ConfigError

_MIB = 1024
"""In a GiB, which is what Daytona counts in."""


@dataclass(frozen=True, kw_only=True)
class DaytonaConfig:
    """One sandbox at Daytona."""

    image: str = ""
    """An image from a registry that Daytona builds the sandbox from. Empty: what `template` says."""
    template: str = ""
    """A snapshot at Daytona to begin with, by its name. Empty, and no image: your organization's default."""
    cpu: float | None = field(default=None, metadata={"above": 0})
    """CPUs, with an image. Daytona gives whole ones; a warning says how many."""
    memory: int | None = field(default=None, metadata={"at_least": 1})
    """MiB of memory, with an image. Daytona gives whole GiB; a warning says how many."""
    disk: int | None = field(default=None, metadata={"at_least": 1})
    """MiB of disk, with an image. Daytona gives whole GiB; a warning says how many."""
    network: bool = True
    """False: the sandbox reaches nothing outside."""
    persistent_filesystem: bool = False
    """Keep its files, in a snapshot at Daytona, for the next one of this task."""
    task_id: str = ""
    """What it is for: `detach()` leaves it to the next program of its task, and a persistent one goes on
    where the last one ended."""
    user: str = ""
    """Who runs commands in it. Empty: the template's or image's own choice."""
    max_lifetime: float = field(default=LEAST, metadata={"at_least": LEAST})
    """Seconds that it goes on at Daytona without a sign of life from here, as whole minutes. Extended while
    it is open."""
    start_timeout: float = field(default=300.0, metadata={"above": 0})
    """Seconds for it to come up, the build of an image included."""


@dataclass(frozen=True, kw_only=True)
class RestoredConfig(DaytonaConfig):
    """One that begins as a snapshot of ours."""

    snapshot: str = ""


def refuse(config: DaytonaConfig) -> None:
    """What the types let through, as an error before anything starts."""
    if config.image and config.template:
        raise ConfigError(
            f"image and template: got {config.image!r} and {config.template!r}, takes one of them",
            backend=NAME,
        )
    if len(config.image.split()) > 1:
        raise wrong("image", config.image, "takes a name without spaces", backend=NAME)
    for key in ("cpu", "memory", "disk"):
        asked = getattr(config, key)
        if asked is not None and not config.image:
            takes = "takes nothing without an image: what is made from a template is as large as that says"
            raise wrong(key, asked, takes, backend=NAME)


def whole(asked: float | None) -> int | None:
    """CPUs as Daytona gives them."""
    return None if asked is None else math.ceil(asked)


def gibibytes(asked: int | None) -> int | None:
    """MiB as Daytona gives them."""
    return None if asked is None else math.ceil(asked / _MIB)


def other_than_asked(config: DaytonaConfig, *, cpu: int, memory: int, disk: int) -> list[str]:
    """What a sandbox has (CPUs, GiB, GiB) and was not asked for, for people."""
    has = {
        "cpu": (config.cpu, cpu, ""),
        "memory": (config.memory, memory * _MIB, " MiB"),
        "disk": (config.disk, disk * _MIB, " MiB"),
    }
    return [
        f"{key}: the sandbox has {given}{unit}, not {asked:g}"
        for key, (asked, given, unit) in has.items()
        if asked is not None and asked != given
    ]
