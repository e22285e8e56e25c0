"""Host directories in a container: `HOST:CONTAINER[:ro]` as text, as mounts and as flags."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_NEVER_WITHIN = ("/boot", "/dev", "/proc", "/sys")
_NEVER_TARGET = ("/", "/dev", "/proc", "/sys")


class Mount(NamedTuple):
    """A host path and where it is seen inside."""

    source: str
    target: str
    read_only: bool = False

    @property
    def flags(self) -> list[str]:
        fields = ["type=bind", f"src={self.source}", f"dst={self.target}"]
        return ["--mount", ",".join(map(_csv, [*fields, *(["readonly"] if self.read_only else [])]))]


def parsed(volume: str) -> Mount:
    """The mount that the text means; ValueError says what is wrong with it."""
    host, *rest = volume.split(":")
    if not 1 <= len(rest) <= 2 or (len(rest) == 2 and rest[1] not in ("ro", "rw")):
        raise ValueError("takes HOST:CONTAINER or HOST:CONTAINER:ro")
    if not (host == "~" or host.startswith(("/", "~/"))):
        raise ValueError("takes a host path that is absolute (or begins with ~/)")
    target = posixpath.normpath(rest[0])
    if not rest[0].startswith("/"):
        raise ValueError("takes a path in the container that is absolute")
    if target in _NEVER_TARGET or _within(target, _NEVER_TARGET[1:]):
        raise ValueError(f"takes a path in the container other than {', '.join(_NEVER_TARGET)}")
    return Mount(host, target, rest[1:] == ["ro"])


def writable(texts: Iterable[str]) -> bool:
    """Whether one of these volumes can be written to inside."""
    return any(not text.endswith(":ro") for text in texts)


def checked(mount: Mount, sockets: Iterable[str], *, local: bool = True) -> Mount:
    """The mount with its source resolved; ValueError when that is missing or must not be seen inside.

    A daemon elsewhere (`local` false) has other directories, and judges itself whether one is there.
    """
    source = os.path.realpath(os.path.expanduser(mount.source)) if local else mount.source
    if local and not os.path.exists(source):
        raise ValueError(f"takes a host path that exists; there is no {source}")
    if source == "/" or _within(source, _NEVER_WITHIN):
        raise ValueError("takes neither the host's root directory nor its /boot, /dev, /proc and /sys")
    for socket in sockets:
        # Whoever can speak to the engine can start a container without any limit.
        if _within(os.path.realpath(socket), [source]):
            raise ValueError(f"takes nothing that holds a container engine's socket ({socket})")
    return mount._replace(source=source)


def engine_sockets(environ: Mapping[str, str], home: Path, uid: int) -> list[str]:
    """The sockets of container engines that are on this machine."""
    runtime = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    named = [environ.get(name, "") for name in ("DOCKER_HOST", "CONTAINER_HOST")]
    candidates = [
        "/run/docker.sock",
        "/var/run/docker.sock",
        "/run/containerd/containerd.sock",
        "/run/podman/podman.sock",
        "/run/crio/crio.sock",
        f"{runtime}/docker.sock",
        f"{runtime}/podman/podman.sock",
        *(str(home / path) for path in (".docker/run/docker.sock", ".docker/desktop/docker.sock")),
        *(str(home / path) for path in (".colima/default/docker.sock", ".orbstack/run/docker.sock")),
        *(each.removeprefix("unix://") for each in named if each.startswith("unix://")),
    ]
    return [path for path in candidates if _is_socket(path)]


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _within(path: str, trees: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(tree) for tree in trees)


def _csv(field: str) -> str:
    """As engines read `--mount`: one line of comma-separated values."""
    return '"' + field.replace('"', '""') + '"' if set(field) & set(',"\n') else field
