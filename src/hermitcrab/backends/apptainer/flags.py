"""The whole security posture of an Apptainer container, as pure functions from a config to flags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hermitcrab.backends.volumes import Mount

if TYPE_CHECKING:
    from hermitcrab.backends.apptainer import ApptainerConfig

WORKSPACE, AGENT = "/workspace", "/.hermitcrab-agent"


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the command line depends on besides the config."""

    image: str
    mounts: Sequence[Mount] = ()
    files: Path | None = None
    """Where a persistent sandbox keeps what is written."""
    home: str = "/root"
    site_config: str = ""
    """A configuration file to use in place of the site's."""


def command_line(config: ApptainerConfig, host: Host, agent: Path, *, limits: bool = True) -> list[str]:
    """A container with the agent in it, after the program's own name."""
    flags = [*posture(config, host, limits=limits), *Mount(str(agent), AGENT, True).flags]
    return [*_global(host), "exec", *flags, "--pwd", WORKSPACE, host.image, AGENT]


def instance_line(config: ApptainerConfig, host: Host, name: str, *, limits: bool = True) -> list[str]:
    """A container with nothing in it."""
    return [*_global(host), "instance", "start", *posture(config, host, limits=limits), host.image, name]


def entering_line(config: ApptainerConfig, name: str, argv: Sequence[str]) -> list[str]:
    """A program in such a container."""
    return ["--silent", "exec", *_without_privileges(config), "--pwd", WORKSPACE, f"instance://{name}", *argv]


def posture(config: ApptainerConfig, host: Host, *, limits: bool = True) -> list[str]:
    """What holds for everything in a container."""
    return [
        *("--containall", "--hostname", config.hostname, *_without_privileges(config)),
        # Root's uid could write to /sys and to the host's /etc/hosts, whatever its capabilities.
        *("--no-mount", "sys,hostfs,bind-paths"),
        *([] if config.network else ["--net", "--network", "none"]),
        *(["--fakeroot"] if config.fakeroot else []),
        *(["--nv"] if config.nv else []),
        *(limit_flags(config) if limits else []),
        *_writable(host),
        *(word for mount in host.mounts for word in mount.flags),
    ]


def _global(host: Host) -> list[str]:
    return ["--silent", *(["--config", host.site_config] if host.site_config else [])]


def _without_privileges(config: ApptainerConfig) -> list[str]:
    capabilities = ",".join(config.capabilities)
    return [
        *("--cleanenv", "--no-eval", "--no-umask", "--no-privs"),
        *(["--add-caps", capabilities] if capabilities else []),
    ]


def limit_flags(config: ApptainerConfig) -> list[str]:
    memory = f"{config.memory}M"
    return [
        *([] if config.cpu is None else ["--cpus", f"{config.cpu:g}"]),
        # Equal, so that there is no swap on top of it.
        *([] if config.memory is None else ["--memory", memory, "--memory-swap", memory]),
        *([] if config.pids_limit is None else ["--pids-limit", str(config.pids_limit)]),
    ]


def _writable(host: Host) -> list[str]:
    taken = any(mount.target == WORKSPACE for mount in host.mounts)
    if host.files is None:
        return ["--writable-tmpfs", *([] if taken else ["--scratch", WORKSPACE])]
    return [
        *("--overlay", str(host.files / "overlay"), "--home", f"{host.files / 'home'}:{host.home}"),
        *([] if taken else Mount(str(host.files / "workspace"), WORKSPACE).flags),
    ]


def with_session_size(site_config: str, mebibytes: int) -> str:
    """A site's configuration, but for how much a container may write to memory."""
    line = f"sessiondir max size = {mebibytes}"
    text, replaced = re.subn(r"(?m)^sessiondir max size *=.*$", line, site_config)
    return text if replaced else f"{text}\n{line}\n"


def session_size(site_config: str) -> int:
    found = re.search(r"(?m)^sessiondir max size *= *(\d+)", site_config)
    return int(found[1]) if found else 0
