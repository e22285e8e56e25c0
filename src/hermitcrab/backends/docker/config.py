"""The settings of a container, those that are refused, and the host directories that they mean."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hermitcrab.backends import volumes
from hermitcrab.backends.docker.owners import RESERVED
from hermitcrab.backends.given import wrong
from hermitcrab.backends.volumes import Mount

WORKSPACE, ROOT_HOME = "/workspace", "/root"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETUID")
"""What package managers need (all but KILL), and our own kills."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}"


@dataclass(frozen=True, kw_only=True)
class DockerConfig:
    """One container. What is not mounted from the host is gone after it."""

    image: str
    """Pulled, with progress, when the engine does not have it. Needs a bash in it."""
    cpu: float | None = field(default=None, metadata={"above": 0})
    """CPUs that it may use at once; 1.5 is one and a half. None: all."""
    memory: int | None = field(default=None, metadata={"at_least": 6})
    """MiB of memory, without any swap on top. What is in the file systems below counts. None: no limit."""
    disk: int | None = field(default=None, metadata={"at_least": 1})
    """MiB that its own layer may grow to, where the engine's storage can limit it. None: no limit."""
    pids_limit: int = field(default=256, metadata={"at_least": 16})
    """Processes and threads at once."""
    ulimits: Mapping[str, int] = field(default_factory=dict)
    """More limits, as in `docker run --ulimit`. With Docker `core` is 0 and `nofile` 65536, or the host's."""
    network: bool = True
    """False leaves it a loopback of its own."""
    volumes: Sequence[str] = ()
    """Host directories inside: `HOST:CONTAINER` or `HOST:CONTAINER:ro`."""
    auto_mount_cwd: bool = False
    """Bind `host_cwd` at /workspace, unless `volumes` has something there."""
    host_cwd: Path | None = None
    """The host directory that `auto_mount_cwd` means. None: where the program is."""
    persistent_filesystem: bool = False
    """Keep /root and /workspace on the host, under HERMITCRAB_SANDBOX_DIR, for the next one of this task."""
    task_id: str = ""
    """What it is for: containers and files of the same task are used again."""
    user: str | None = None
    """A user of the image, or `UID:GID`. None: the image's own, mostly root."""
    run_as_host_user: bool = False
    """Run as the host's user and group, so that files in volumes are theirs."""
    read_only: bool = False
    """Make all but volumes and the file systems in memory read-only."""
    capabilities: Sequence[str] = CAPABILITIES
    """Capabilities that root inside keeps; can only be narrowed."""
    runtime: str = ""
    """Another OCI runtime that the engine knows, such as `runsc` for gVisor."""
    platform: str = ""
    """As in `docker run --platform`, when the image has several."""
    pull: Literal["missing", "never", "always"] = "missing"
    """When to pull the image."""
    max_lifetime: float = field(default=7200, metadata={"above": 0})
    """Seconds that it goes on without a sign of life from its owner."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the container, besides our own `hermitcrab.*`."""

    @property
    def runs_from(self) -> str:
        """The image of the container itself."""
        return self.image


@dataclass(frozen=True, kw_only=True)
class RestoredConfig(DockerConfig):
    """The same container, but for what it begins with. It is still matched by the image of the settings."""

    snapshot: str

    @property
    def runs_from(self) -> str:
        return self.snapshot


def refuse(config: DockerConfig) -> None:
    """What the types let through, as an error before anything starts."""
    unknown = [name for name in config.capabilities if name not in CAPABILITIES]
    if unknown:
        raise wrong("capabilities", unknown[0], f"takes some of {', '.join(CAPABILITIES)}")
    if config.user and config.run_as_host_user:
        raise wrong("user", config.user, "goes not together with run_as_host_user")
    if config.task_id and not re.fullmatch(_NAME, config.task_id):
        raise wrong("task_id", config.task_id, "takes letters, digits, dots, dashes and _, 63 at most")
    for name in config.labels:
        if name.startswith(RESERVED) or "=" in name:
            raise wrong("labels", name, f"takes names without = that do not begin with {RESERVED}")
    for key in ("image", "user", "runtime", "platform"):
        if str(getattr(config, key) or "").startswith("-"):
            raise wrong(key, getattr(config, key), "takes nothing that begins with a dash")
    if not config.image:
        raise wrong("image", "", "takes the name of an image")


def mounts(
    config: DockerConfig, *, data: Path, environ: Mapping[str, str], local: bool = True
) -> list[Mount]:
    """The host directories that are seen inside, the persistent ones made where they are missing.

    `data` is where those are kept. The user's own volumes come before ours at the same place.
    """
    sockets = volumes.engine_sockets(environ, Path.home(), os.getuid())
    chosen: dict[str, Mount] = {}
    for text in config.volumes:
        try:
            mount = volumes.checked(volumes.parsed(text), sockets, local=local)
        except ValueError as error:
            raise wrong("volumes", text, str(error)) from None
        if mount.target in chosen:
            raise wrong("volumes", text, f"takes one volume at {mount.target}")
        chosen[mount.target] = mount
    if config.auto_mount_cwd and WORKSPACE not in chosen:
        directory = config.host_cwd or Path.cwd()
        try:
            chosen[WORKSPACE] = volumes.checked(Mount(str(directory), WORKSPACE), sockets, local=local)
        except ValueError as error:
            raise wrong("host_cwd", directory, str(error)) from None
    if config.persistent_filesystem:
        for mount in _kept(data / (config.task_id or "default")):
            chosen.setdefault(mount.target, mount)
    return list(chosen.values())


def _kept(directory: Path) -> Iterator[Mount]:
    for name, target in (("home", ROOT_HOME), ("workspace", WORKSPACE)):
        path = directory / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield Mount(str(path.resolve()), target)
