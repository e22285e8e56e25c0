"""The whole security posture of a container, as pure functions from a config to an engine's flags."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import NamedTuple

from hermitcrab.backends.docker.config import ROOT_HOME, WORKSPACE, DockerConfig
from hermitcrab.backends.volumes import Mount

AGENT = "/.hermitcrab-agent"
OPEN_FILES = 65536
GVISOR = "runsc"
_HOST_THREADS_PER_PROCESS = 64
"""gVisor has 8 and more for each process inside, and ends the whole sandbox when it cannot have another. So
the limit that counts is its own, by a ulimit, and the engine's is far above it."""


class Person(NamedTuple):
    """A user inside, and where their files belong."""

    uid: int
    gid: int
    home: str


@dataclass(frozen=True, kw_only=True)
class Image:
    """What an engine says of an image."""

    id: str = ""
    machine: str = ""
    """As `uname -m` has it."""
    user: str = ""
    directory: str = ""
    """Its WORKDIR."""
    home: str = ""
    """The HOME that it sets for everybody, if it does."""
    people: Mapping[str, Person] = field(default_factory=dict)
    """Its users other than root, as far as they were looked up."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the posture depends on besides the config."""

    engine: str = "docker"
    rootless: bool = False
    uid: int = 0
    gid: int = 0
    open_files: int | None = None
    """The most that a process of this machine may have; None when there is no bound."""
    refuses: frozenset[str] = frozenset()
    """Settings that this engine turned down before."""


class Refusal(NamedTuple):
    """How an engine says that it cannot apply a setting, and how we pass it on."""

    setting: str
    pattern: str
    meaning: str


REFUSALS = (
    Refusal(
        "disk",
        r"storage-opt|storage opt|overlay\.size|project quota",
        "disk: this engine's storage cannot limit the size of a container (it takes overlay on xfs mounted "
        "with pquota, btrfs or zfs)",
    ),
    Refusal(
        "cpu",
        r"[Rr]ange of CPUs|NanoCPUs|CPU cfs|CFS|cpu controller|cpu\.max|cpu\.cfs",
        "cpu: this machine has fewer CPUs, or its kernel cannot limit them",
    ),
    Refusal(
        "memory",
        r"[Mm]emory limit capabilit|memory controller|memory\.(max|limit)",
        "memory: this machine's control groups cannot limit it",
    ),
    Refusal(
        "pids_limit",
        r"pids[ .-](limit|cgroup|controller|max)",
        "pids_limit: this machine's control groups cannot limit it",
    ),
    Refusal("ulimits", r"setting rlimit", "ulimits: the engine may not raise them so far on this machine"),
    Refusal(
        "init",
        r"docker-init|catatonit|init binary|container-init",
        "an init: the engine's own is not installed, so that our agent is process 1 and reaps",
    ),
)


def refused(message: str) -> str:
    """The setting that an engine's error is about; empty when it is about something else."""
    return next((each.setting for each in REFUSALS if re.search(each.pattern, message)), "")


def run_flags(config: DockerConfig, host: Host, image: Image, mounts: Sequence[Mount]) -> list[str]:
    """Everything between `run` and the image, but for names, labels and the agent itself."""
    given, person = _user(config, host, image)
    return [
        *([] if "init" in host.refuses else ["--init"]),
        # The engine would keep a copy of all that goes over the pipe.
        *("--log-driver", "none", "--no-healthcheck"),
        # Whoever stops it must not end its commands one by one, as if they had come to an end themselves.
        *("--stop-signal", "KILL"),
        *("--cap-drop", "ALL", *_each("--cap-add", config.capabilities)),
        *("--security-opt", "no-new-privileges"),
        *_limits(config, host),
        *([] if config.network else ["--network", "none"]),
        *(["--read-only"] if config.read_only else []),
        *(["--user", given] if given else []),
        *(["--userns", "keep-id"] if host.rootless and config.run_as_host_user else []),
        *(["--env", f"HOME={ROOT_HOME}"] if person and person.home == ROOT_HOME else []),
        # Podman would hand the host's proxy settings to every container.
        *(["--http-proxy=false"] if host.engine == "podman" else []),
        *(["--runtime", config.runtime] if config.runtime else []),
        *(["--platform", config.platform] if config.platform else []),
        *_memory_file_systems(config, host, person, mounts),
        *(word for mount in mounts for word in mount.flags),
        *("--workdir", start_directory(image, mounts)),
    ]


def home_inside(config: DockerConfig, host: Host, image: Image) -> str:
    """The HOME that commands will have."""
    person = _user(config, host, image)[1]
    if person and person.home == ROOT_HOME:
        return ROOT_HOME
    return image.home or (person.home if person else ROOT_HOME)


def _user(config: DockerConfig, host: Host, image: Image) -> tuple[str, Person | None]:
    """Who is to be named to the engine, and who that is unless it is root."""
    given = f"{host.uid}:{host.gid}" if config.run_as_host_user else config.user or ""
    name = given or image.user
    return given, numeric(name) or image.people.get(name.partition(":")[0])


def label_flags(labels: Mapping[str, str]) -> list[str]:
    return _each("--label", map("=".join, labels.items()))


def unmet(config: DockerConfig, host: Host) -> list[str]:
    """What was asked for and is not applied, a sentence each."""
    asked = {
        "disk": config.disk is not None,
        "cpu": config.cpu is not None,
        "memory": config.memory is not None,
        "ulimits": bool(config.ulimits),
    }
    return [
        f"{each.meaning}; the container runs without"
        for each in REFUSALS
        if each.setting in host.refuses and asked.get(each.setting, True)
    ]


def start_directory(image: Image, mounts: Iterable[Mount]) -> str:
    """The image's own, unless it has none or the user put something into the workspace."""
    own = image.directory.startswith("/") and image.directory != "/"
    return image.directory if own and all(mount.target != WORKSPACE for mount in mounts) else WORKSPACE


def numeric(user: str) -> Person | None:
    """Who is given by number and is not root. The image need not know them, so root's home is theirs."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", user)
    if match is None or int(match[1]) == 0:
        return None
    return Person(int(match[1]), int(match[2] or 0), ROOT_HOME)


def named(user: str) -> str:
    """The name of a user that has to be looked up in the image; empty for root and for numbers."""
    name = user.partition(":")[0]
    return "" if name == "root" or name.isdecimal() else name


def _limits(config: DockerConfig, host: Host) -> list[str]:
    pids = config.pids_limit * (_HOST_THREADS_PER_PROCESS if config.runtime == GVISOR else 1)
    memory = f"{config.memory}m"
    flags = {
        "pids_limit": ["--pids-limit", str(pids)],
        "cpu": [] if config.cpu is None else ["--cpus", f"{config.cpu:g}"],
        # Equal, so that there is no swap on top of it.
        "memory": [] if config.memory is None else ["--memory", memory, "--memory-swap", memory],
        "disk": [] if config.disk is None else ["--storage-opt", f"size={config.disk}m"],
        "ulimits": _each("--ulimit", _ulimits(config, host)),
    }
    return [word for setting, words in flags.items() if setting not in host.refuses for word in words]


def _ulimits(config: DockerConfig, host: Host) -> list[str]:
    most = OPEN_FILES if host.open_files is None else min(OPEN_FILES, host.open_files)
    # A single one makes Podman forget those of its containers.conf, which are made to fit the machine.
    usual = {} if host.engine == "podman" else {"core": 0, "nofile": most}
    if config.runtime == GVISOR:
        usual["nproc"] = config.pids_limit
    return [f"{name}={value}" for name, value in {**usual, **config.ulimits}.items()]


def _memory_file_systems(
    config: DockerConfig, host: Host, person: Person | None, mounts: Iterable[Mount]
) -> list[str]:
    owner = f",uid={person.uid},gid={person.gid}" if person else ""
    # Podman would copy what the image has there, which Docker cannot.
    common = "rw,nosuid,nodev" + (",notmpcopyup" if host.engine == "podman" else "")
    places = {
        "/tmp": "exec,size=512m,mode=1777",
        "/var/tmp": "noexec,size=256m,mode=1777",
        "/run": "noexec,size=64m,mode=0755" + owner,
        WORKSPACE: "exec,size=10g,mode=0755" + owner,
        ROOT_HOME: "exec,size=1g,mode=0700" + owner,
    }
    if config.read_only or not config.persistent_filesystem:
        places["/home"] = "exec,size=1g,mode=0755" + owner
        if person and person.home.startswith("/home/") and re.fullmatch(r"[\w./-]+", person.home):
            # The image's own is hidden by the line above.
            places[person.home] = "exec,size=1g,mode=0700" + owner
    taken = {mount.target for mount in mounts}
    if person and person.home not in taken:
        # The engine would make the directories on the way to a mount root's.
        on_the_way = (at for target in taken for at in map(str, PurePosixPath(target).parents))
        within = f"{person.home}/"
        places |= {at: f"exec,size=64m,mode=0755{owner}" for at in on_the_way if at.startswith(within)}
    return _each("--tmpfs", (f"{at}:{common},{how}" for at, how in places.items() if at not in taken))


def _each(flag: str, values: Iterable[str]) -> list[str]:
    return [word for value in values for word in (flag, value)]
