"""The settings of a microVM, what of them is refused, and what follows from them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hermitcrab.backends import volumes as host_directories
from hermitcrab.backends.clouds.kept import DEFAULT_TASK
from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.backends.data import refuse_task
from hermitcrab.backends.given import wrong
from hermitcrab.backends.microsandbox.failures import NAME
from hermitcrab.backends.volumes import Mount

_MOST_CPUS = 255
_NOT_THE_VMS = frozenset({"persistent_filesystem", "task_id", "start_timeout"})
"""Settings that another VM may have otherwise and be the same."""


@dataclass(frozen=True, kw_only=True)
class MicrosandboxConfig:
    """One microVM on this machine."""

    image: str
    """An OCI image, pulled when microsandbox does not have it; or the path of a root directory or disk image.
    Needs a bash in it."""
    cpu: int | None = field(default=None, metadata={"at_least": 1})
    """Virtual CPUs. None: microsandbox's default, 1."""
    memory: int | None = field(default=None, metadata={"at_least": 64})
    """MiB of memory. None: microsandbox's default, 512."""
    disk: int | None = field(default=None, metadata={"at_least": 64})
    """MiB that the files on top of an OCI image may take. None: microsandbox's default, 4096."""
    network: bool = True
    """True: the internet, but neither this machine nor its private networks. False: nothing."""
    volumes: Sequence[str] = ()
    """Host directories inside: `HOST:GUEST` or `HOST:GUEST:ro`."""
    persistent_filesystem: bool = False
    """Leave the VM, with all of its files, for the next program with this task."""
    task_id: str = ""
    """What it is for: a persistent VM is found again by it."""
    user: str = ""
    """Who runs commands in it. Empty: the image's own choice, mostly root."""
    max_duration: float | None = field(default=None, metadata={"above": 0})
    """Seconds after which it is stopped, whatever runs in it; the next command starts it again."""
    idle_timeout: float = field(default=LEAST, metadata={"at_least": LEAST})
    """Seconds without a sign of life from an open environment after which it stops by itself."""
    start_timeout: float = field(default=300.0, metadata={"above": 0})
    """Seconds for it to come up; an image may have to be pulled."""

    @property
    def max_lifetime(self) -> float:
        """As those who keep sandboxes elsewhere call it."""
        return self.idle_timeout

    @property
    def task(self) -> str:
        """What a persistent one is found by; empty for others."""
        return (self.task_id or DEFAULT_TASK) if self.persistent_filesystem else ""


@dataclass(frozen=True, kw_only=True)
class RestoredConfig(MicrosandboxConfig):
    """One that begins as a snapshot."""

    snapshot: str = ""


def refuse(config: MicrosandboxConfig) -> None:
    """What the types let through, as an error before anything starts."""
    refuse_task(config.task_id, NAME)
    if not config.image:
        raise wrong("image", "", "takes the name of an image", backend=NAME)
    for key in ("image", "user"):
        if str(getattr(config, key)).startswith("-"):
            raise wrong(key, getattr(config, key), "takes nothing that begins with a dash", backend=NAME)
    if config.cpu is not None and config.cpu > _MOST_CPUS:
        raise wrong("cpu", config.cpu, f"takes {_MOST_CPUS} at most", backend=NAME)
    if config.disk is not None and config.image.startswith((".", "/")):
        raise wrong("disk", config.disk, "goes together with an OCI image only", backend=NAME)
    mounts(config)


def mounts(config: MicrosandboxConfig) -> list[Mount]:
    """The host directories that are seen inside."""
    sockets = host_directories.engine_sockets(os.environ, Path.home(), os.getuid())
    chosen: dict[str, Mount] = {}
    for text in config.volumes:
        try:
            mount = host_directories.checked(host_directories.parsed(text), sockets)
        except ValueError as error:
            raise wrong("volumes", text, str(error), backend=NAME) from None
        if mount.target in chosen or ":" in mount.source:
            takes = "takes one volume at each place, and no colon in a path"
            raise wrong("volumes", text, takes, backend=NAME)
        chosen[mount.target] = mount
    return list(chosen.values())


def vm_name(config: MicrosandboxConfig, key: str) -> str:
    """One for all programs with the same persistent task; else one for each key."""
    return f"hermitcrab-{config.task or key}"


def settings(config: MicrosandboxConfig) -> dict[str, Any]:
    """What a VM is made with, as JSON has it."""
    known = {each.name for each in fields(MicrosandboxConfig)} - _NOT_THE_VMS
    found: dict[str, Any] = json.loads(json.dumps({name: getattr(config, name) for name in sorted(known)}))
    return found


def refuse_other(config: MicrosandboxConfig, name: str, made_with: str) -> None:
    """A VM that was made with other settings is neither changed nor replaced: its files are all there is."""
    try:
        had = json.loads(made_with)
    except ValueError:
        return  # made by somebody else, or by another version
    for key, value in settings(config).items():
        if key in had and had[key] != value:
            takes = (
                f"is {had[key]!r} for the VM of task {config.task or config.task_id!r}; "
                f"choose another task_id, or remove the VM and its files with `msb rm --force {name}`"
            )
            raise wrong(key, value, takes, backend=NAME)
