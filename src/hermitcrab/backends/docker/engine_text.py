"""What is known of Docker and Podman, and how they put things. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hermitcrab.backends.docker.flags import Person

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64", "386": "i686", "arm": "armv7l", "ppc64le": "ppc64le"}


@dataclass(frozen=True)
class Kind:
    """One of the two engines."""

    name: str
    title: str
    service: str
    """What must answer: a daemon, or the program itself."""
    install: str
    begin: str
    """What to do when it does not answer."""
    places: tuple[str, ...] = ()
    """Where it is on a Mac when the PATH of a program with a window does not lead there."""


DOCKER = Kind(
    "docker",
    "Docker",
    "the Docker daemon",
    "Install Docker (Debian, Ubuntu: apt-get install docker.io; macOS: Docker Desktop, OrbStack or Colima).",
    "Start it (Linux: systemctl start docker; macOS: open Docker Desktop), or set DOCKER_HOST.",
    (
        "/usr/local/bin/docker",
        "/opt/homebrew/bin/docker",
        "/Applications/Docker.app/Contents/Resources/bin/docker",
        "~/.docker/bin/docker",
        "~/.orbstack/bin/docker",
        "~/.rd/bin/docker",
    ),
)
PODMAN = Kind(
    "podman",
    "Podman",
    "Podman",
    "Install Podman (Debian, Ubuntu: apt-get install podman; macOS: brew install podman).",
    "Try `podman info`; on macOS start its machine: `podman machine start`.",
    ("/opt/podman/bin/podman", "/opt/homebrew/bin/podman", "/usr/local/bin/podman"),
)


def is_local(kind: Kind, environ: Mapping[str, str]) -> bool:
    """Whether the engine sees this machine's files, as far as its variables tell."""
    address = environ.get("DOCKER_HOST" if kind is DOCKER else "CONTAINER_HOST", "")
    return not address or address.startswith(("unix://", "/"))


def machine(architecture: str) -> str:
    """`uname -m` for an image's architecture: "amd64" or "linux/arm64/v8"."""
    parts = architecture.split("/")
    name = parts[1] if len(parts) > 1 else parts[0]
    return _MACHINES.get(name, name)


def person(passwd: str, name: str) -> Person | None:
    """The entry of that name in an archive that holds a passwd file and nothing else."""
    entry = re.search(rf"(?:^|\0){re.escape(name)}:[^:]*:(\d+):(\d+):[^:]*:([^:]*):", passwd, re.MULTILINE)
    return Person(int(entry[1]), int(entry[2]), entry[3]) if entry and int(entry[1]) else None


def home_in(variables: Iterable[str]) -> str:
    """HOME among an image's variables; empty when it is none."""
    return next((each[5:] for each in variables if re.match("HOME=/.", each)), "")


def plain(message: str) -> str:
    """An engine's complaint without its ornaments."""
    lines = [line.strip() for line in message.splitlines()]
    ornaments = ("Run 'docker", "See 'docker", "WARNING:")
    text = " ".join(line for line in lines if not line.startswith(ornaments))
    return re.sub(r"^(docker: )?(Error( response from daemon)?: )?", "", text).strip()


def warned(message: str) -> list[str]:
    """What an engine leaves out while it starts a container nevertheless."""
    spoken = [re.sub(r'^time=.* level=warning msg="?', "", line) for line in message.splitlines()]
    return [
        line.removeprefix("WARNING: ").rstrip('"')
        for line in spoken
        if line.startswith("WARNING: ") or re.search(r"not supported|ignored|discarded", line)
    ]


def hint(complaint: str) -> str | None:
    """What to do about a complaint that no container can be had at all; None when it is about something else.

    Empty when the engine is to be started.
    """
    return next((each for pattern, each in _HINTS if re.search(pattern, complaint)), None)


_HINTS = (
    (
        r"permission denied while trying to connect|[Gg]ot permission denied|connect: permission denied",
        "Your user may not speak to the daemon: join its group (`sudo usermod -aG docker $USER`, then log in "
        "again), or use rootless Docker or Podman.",
    ),
    (
        r"Cannot connect to the Docker daemon|[Ii]s the docker daemon running|error during connect|"
        r"Cannot connect to Podman|unable to connect to Podman",
        "",
    ),
    (
        r"[Uu]nknown runtime|unknown or invalid runtime|runtime \S+ not found|no such runtime",
        "Install the runtime (gVisor: apt-get install runsc) and name it under `runtimes` in the daemon's "
        "daemon.json, or in Podman's containers.conf.",
    ),
)
