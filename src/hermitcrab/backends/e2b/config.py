"""The settings of a sandbox at E2B."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.backends.e2b.failures import NAME
from hermitcrab.backends.given import wrong


@dataclass(frozen=True, kw_only=True)
class E2BConfig:
    """One sandbox at E2B. Its CPUs, memory and disk are those that its template was built with."""

    template: str = "base"
    """A template's name or id."""
    cpu: int | None = field(default=None, metadata={"at_least": 1})
    """CPUs that the template is expected to have; a warning says when it has others."""
    memory: int | None = field(default=None, metadata={"at_least": 1})
    """MiB of memory that the template is expected to have; a warning says when it has others."""
    disk: int | None = None
    """Refused: E2B knows no limit of the disk."""
    network: bool = True
    """False: the sandbox does not reach the internet."""
    persistent_filesystem: bool = False
    """Keep its files, in a snapshot at E2B, for the next one of this task."""
    task_id: str = ""
    """What it is for: `detach()` leaves it to the next program of its task, and a persistent one goes on
    where the last one ended."""
    user: str = ""
    """Who runs commands in it. Empty: the template's own choice, mostly `user`."""
    max_lifetime: float = field(default=LEAST, metadata={"at_least": LEAST})
    """Seconds that it goes on at E2B without a sign of life from here. Extended while it is open."""
    start_timeout: float = field(default=120.0, metadata={"above": 0})
    """Seconds for it to come up."""


@dataclass(frozen=True, kw_only=True)
class RestoredConfig(E2BConfig):
    """One that begins as a snapshot."""

    snapshot: str = ""


def refuse(config: E2BConfig) -> None:
    """What the types let through, as an error before anything starts."""
    if config.disk is not None:
        raise wrong("disk", config.disk, "takes nothing: E2B's disks are as the template says", backend=NAME)
    if not config.template:
        raise wrong("template", config.template, "takes the name of a template", backend=NAME)
