"""The settings of a sandbox at Modal."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.backends.given import wrong
from hermitcrab.backends.modal.failures import NAME

LONGEST_LIFE = 24 * 3600
"""Seconds that Modal lets a sandbox live, fixed when it is made."""
_LEAST_CPU = 0.125
_LEAST_MEMORY = 128


@dataclass(frozen=True, kw_only=True)
class ModalConfig:
    """One sandbox at Modal."""

    image: str = ""
    """An image's name in a registry, or `im-...`, one that Modal has. Empty: Debian with Python."""
    cpu: float | None = field(default=None, metadata={"at_least": _LEAST_CPU})
    """CPU cores that it has, in steps of 0.001. None: Modal's choice."""
    memory: int | None = field(default=None, metadata={"at_least": _LEAST_MEMORY})
    """MiB of memory that it has. None: Modal's choice."""
    disk: int | None = None
    """Refused: Modal knows no limit of the disk."""
    network: bool = True
    """False: the sandbox has no network."""
    region: str = ""
    """Where it runs, such as `eu` or `us-east`. Empty: Modal's choice, which costs least."""
    persistent_filesystem: bool = False
    """Keep its files, in a snapshot at Modal for 30 days, for the next one of this task."""
    task_id: str = ""
    """What it is for: `detach()` leaves it to the next program of its task, and a persistent one goes on
    where the last one ended."""
    max_lifetime: float = field(default=LEAST, metadata={"at_least": LEAST})
    """Seconds that it goes on at Modal when nothing of ours runs in it any more."""
    start_timeout: float = field(default=600.0, metadata={"above": 0})
    """Seconds for it to come up, with its image, which Modal fetches when it is new there."""


@dataclass(frozen=True, kw_only=True)
class RestoredConfig(ModalConfig):
    """One that begins as a snapshot."""

    snapshot: str = ""


def refuse(config: ModalConfig) -> None:
    """What the types let through, as an error before anything starts."""
    if config.disk is not None:
        raise wrong("disk", config.disk, "takes nothing: Modal has no limit of the disk", backend=NAME)
    if len(config.image.split()) > 1:
        raise wrong("image", config.image, "takes a name without spaces", backend=NAME)
    if config.max_lifetime > LONGEST_LIFE:
        raise wrong("max_lifetime", config.max_lifetime, f"takes {LONGEST_LIFE} at most", backend=NAME)


def rounded(config: ModalConfig) -> list[str]:
    """What Modal does not take as it was asked for, for people."""
    if config.cpu is None:
        return []
    taken = int(1000 * config.cpu) / 1000  # as the SDK does it
    return [] if taken == config.cpu else [f"cpu: Modal counts thousandths: {taken:g}, not {config.cpu:g}"]
