"""Apptainer (and Singularity): a contained sandbox without a daemon or root, as HPC sites have it.

A sandbox is one `apptainer exec` with the agent in it, and not an instance: it needs no name, no second
program to enter it and nobody to remove it, because it ends with its pipe, whoever was killed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import pwd
import re
import stat
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hermitcrab.agent.program import binary_for_sandbox
from hermitcrab.backends import volumes
from hermitcrab.backends.apptainer import image as apptainer_image
from hermitcrab.backends.apptainer import plain as apptainer_plain
from hermitcrab.backends.apptainer.flags import (
    WORKSPACE,
    Host,
    command_line,
    limit_flags,
    session_size,
    with_session_size,
)
from hermitcrab.backends.apptainer.program import (
    NAME,
    QUESTION_SECONDS,
    Installation,
    environment,
    explained,
    find,
    plain,
    wrong,
)
from hermitcrab.backends.apptainer.snapshots import layer, trees
from hermitcrab.backends.archived import Archived
from hermitcrab.backends.data import data_directory
from hermitcrab.backends.given import carried_mounts
from hermitcrab.backends.volumes import Mount
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram, run_once
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Health, Luggage, Traits
from hermitcrab.errors import (
    BackendUnavailable,
    HermitcrabWarning,
    SandboxError,
    SandboxStartError,
)

USUAL_DISK = 1024
"""MiB in memory where a user may choose; Apptainer's own 64 hold no `git clone`."""
_LOCK_SECONDS = 3.0
_REBUILD = "Reinstall hermitcrab with a C compiler."
_MEMORY_GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
_LOOPBACK_NAMES = Path(__file__).with_name("loopback-hosts")


@dataclass(frozen=True, kw_only=True)
class ApptainerConfig:
    """One container. What is written in it is gone after it, unless it is persistent."""

    image: str
    """A SIF, the directory of a root file system, docker-archive:FILE or docker://NAME (unpacked once)."""
    network: bool = True
    """The host's own network, as Apptainer has it. False leaves a loopback alone."""
    persistent_filesystem: bool = False
    """Keep all that commands write, for the next sandbox of the same task."""
    task_id: str = "default"
    """Whose files a persistent sandbox has. One sandbox at a time can have them."""
    volumes: Sequence[str] = ()
    """Host paths to show inside, each `HOST:CONTAINER` or `HOST:CONTAINER:ro`."""
    cpu: float | None = field(default=None, metadata={"above": 0})
    """CPUs. None: no limit."""
    memory: int | None = field(default=None, metadata={"at_least": 1})
    """MiB. None: no limit."""
    pids_limit: int | None = field(default=None, metadata={"at_least": 1})
    """Processes and threads. None: no limit."""
    disk: int | None = field(default=None, metadata={"at_least": 1})
    """MiB that can be written to memory. None: 1024 where you may choose, else what the site has set."""
    hostname: str = "hermitcrab"
    """What the sandbox calls itself."""
    fakeroot: bool = False
    """Root inside, by a user namespace. Package managers work in it when the image is your user's own."""
    capabilities: Sequence[str] = ()
    """Linux capabilities, such as CHOWN, that commands have. None by default, for root neither."""
    nv: bool = False
    """Bring in NVIDIA's devices and libraries."""
    executable: str = ""
    """The program. Empty: apptainer on PATH, else singularity."""


async def start(config: ApptainerConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    with ExitStack() as stack:
        ready = await asyncio.to_thread(stack.enter_context, prepared(config, luggage))
        try:
            return await _started(ready)
        except SandboxStartError as error:
            if not (limit_flags(config) and "cgroup" in str(error)):
                raise explained(error, config.image) from error
            _warn(f"{_limits(config)}: this host lets none be set, there is no limit ({plain(error)})")
        try:
            return await _started(ready, limits=False)
        except SandboxStartError as error:
            raise explained(error, config.image) from error


async def _started(ready: Prepared, *, limits: bool = True) -> AgentSandbox:
    agent = binary_for_sandbox(platform.machine())
    if agent is not None:
        return await AgentSandbox.start(NAME, ready.client(agent, limits=limits))
    _warn(f"{_no_agent()}; each command takes an `apptainer exec` of its own, and there are no terminals")
    return await apptainer_plain.start(ready.program, ready.config, ready.host, ready.fds, limits=limits)


def _no_agent() -> str:
    return f"no agent program was built for {platform.machine()}"


@dataclass(frozen=True)
class Prepared:
    """All that is needed to start one sandbox, while its descriptors are open."""

    program: str
    config: ApptainerConfig
    host: Host
    fds: Sequence[int]

    def client(self, agent: Path, *, limits: bool = True) -> ClientProgram:
        words = command_line(self.config, self.host, agent, limits=limits)
        return ClientProgram([self.program, *words], environment(os.environ), pass_fds=self.fds)


@contextmanager
def prepared(config: ApptainerConfig, luggage: Luggage = NO_LUGGAGE) -> Iterator[Prepared]:
    """Waits for locks and images. What is open within the block, the sandbox inherits and keeps open."""
    _refuse_names(config)
    installation = find(config.executable)
    mounts = [*_own_mounts(config), *_volumes(config)]
    taken = {mount.target for mount in mounts}
    mounts += carried_mounts(luggage.mounts, _home_inside(config), taken=taken, backend=NAME)
    image = apptainer_image.ready(config.image, installation)
    with ExitStack() as stack:
        host = Host(image=image, mounts=mounts)
        fds = []
        if config.persistent_filesystem:
            files = data_directory(os.environ) / NAME / config.task_id
            fds.append(_claim(files, config.task_id, stack))
            host = replace(host, files=files, home=_home_inside(config))
        text = _own_config(config, installation)
        if text:
            fds.append(_memory_file(text.encode(), stack))
            host = replace(host, site_config=f"/proc/self/fd/{fds[-1]}")
        yield Prepared(installation.program, config, host, fds)


def _own_mounts(config: ApptainerConfig) -> list[Mount]:
    names = Path("/etc/hosts") if config.network else _LOOPBACK_NAMES
    # By its counters the agent tells a process that was out of memory from one that was killed.
    counters = next(filter(Path.is_dir, _MEMORY_GROUPS), None) if config.memory is not None else None
    return [
        *(Mount(path, path, True) for path in _kernel_files()),
        *([Mount(str(counters), str(counters), True)] if counters else []),
        *([Mount(str(names), "/etc/hosts", True)] if names.exists() else []),
    ]


def _kernel_files() -> list[str]:
    """Those parts of /proc that are no process's own.

    Made read-only, because the kernel asks no capability of root's uid there: a core_pattern written
    inside would run on the host. While they are covered it also refuses to mount another /proc.
    """
    found = []
    with os.scandir("/proc") as entries:
        for entry in entries:
            if not entry.name.isdigit() and not entry.is_symlink():
                mode = entry.stat().st_mode
                if stat.S_ISDIR(mode) or mode & 0o222:
                    found.append(entry.path)
    return sorted(found)


def _volumes(config: ApptainerConfig) -> list[Mount]:
    sockets = volumes.engine_sockets(os.environ, Path.home(), os.getuid())
    mounts: dict[str, Mount] = {}
    for volume in config.volumes:
        try:
            mount = volumes.checked(volumes.parsed(volume), sockets)
        except ValueError as error:
            raise wrong("volumes", volume, str(error)) from None
        if mount.target in mounts:
            raise wrong("volumes", volume, f"takes one volume at {mount.target}")
        mounts[mount.target] = mount
    return list(mounts.values())


def _claim(files: Path, task: str, stack: ExitStack) -> int:
    """Makes the task's directories and locks them: two overlays on one directory destroy each other."""
    for name in ("overlay", "home", "workspace"):
        (files / name).mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(files / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    stack.callback(os.close, lock)
    # A sandbox whose owner was killed a moment ago is still on its way out.
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise SandboxStartError(
                    f"task_id {task!r}: another persistent sandbox has its files; end that one first, "
                    "or choose another task_id",
                    backend=NAME,
                ) from None
        time.sleep(0.05)


def _own_config(config: ApptainerConfig, installation: Installation) -> str:
    """The site's configuration with the room that was asked for; empty to leave it as it is."""
    if config.disk is not None and config.persistent_filesystem:
        _warn("disk: the files of a persistent sandbox are not limited, only its /tmp is")
    if os.geteuid() == 0 or config.fakeroot:
        if config.disk is not None:
            _warn("disk: Apptainer limits nothing for root and fakeroot, there is no limit")
        return ""
    site = installation.site_config()
    if not site:
        if config.disk is not None:
            _warn("disk: this Apptainer takes no user's choice, the site's `sessiondir max size` holds")
        return ""
    wanted = config.disk or max(USUAL_DISK, session_size(site))
    return "" if wanted == session_size(site) else with_session_size(site, wanted)


def _memory_file(content: bytes, stack: ExitStack) -> int:
    fd = os.memfd_create("hermitcrab-apptainer.conf")
    stack.callback(os.close, fd)
    os.write(fd, content)
    return fd


def _limits(config: ApptainerConfig) -> str:
    return ", ".join(name for name in ("cpu", "memory", "pids_limit") if getattr(config, name) is not None)


def _home_inside(config: ApptainerConfig) -> str:
    return "/root" if config.fakeroot else _home()


def _home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return str(Path.home())


def _refuse_names(config: ApptainerConfig) -> None:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,61}[A-Za-z0-9])?", config.hostname):
        raise wrong("hostname", config.hostname, "takes letters, digits, dots and dashes, 63 at most")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", config.task_id):
        raise wrong("task_id", config.task_id, "takes letters, digits, dots, dashes and _, 128 at most")
    for name in config.capabilities:
        if not re.fullmatch(r"(CAP_)?[A-Z_]+", name):
            raise wrong("capabilities", name, "takes names such as CHOWN")


def check() -> Health:
    """Really starts one, from a root file system that holds nothing but the agent."""
    try:
        program = find().program
        agent = binary_for_sandbox(platform.machine())
        if agent is None:
            return Health(True, f"{program} is there; {_no_agent()}: commands start more slowly", _REBUILD)
        with tempfile.TemporaryDirectory(prefix="hermitcrab-") as root:
            for name in ("dev", "etc", "proc", "tmp", "var/tmp"):
                Path(root, name).mkdir(parents=True)
            _try(ApptainerConfig(image=root), agent)
            try:
                _try(ApptainerConfig(image=root, pids_limit=100), agent)
            except SandboxError as error:
                return Health(True, f"{program} starts sandboxes, without limits ({plain(error)})")
    except BackendUnavailable as error:
        return Health(False, str(error).removesuffix(error.hint).strip(), error.hint)
    except (OSError, SandboxError, subprocess.TimeoutExpired) as error:
        return Health(False, plain(error))
    return Health(True, f"{program} starts sandboxes")


def _try(config: ApptainerConfig, agent: Path) -> None:
    """Starts one and ends it at once; raises what `start` would."""
    with prepared(config) as ready:
        done = run_once(ready.client(agent), timeout=QUESTION_SECONDS)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace") or f"it ended with {done.returncode}"
        raise explained(SandboxStartError(said, backend=NAME), config.image)


BACKEND = Backend(
    name=NAME,
    summary="a contained Apptainer or Singularity container, without root",
    config=ApptainerConfig,
    traits=Traits(isolated=True, network="host", creates_cwd=True, carries="mounts", workspace=WORKSPACE),
    start=start,
    check=check,
    target="image",
    exposes=lambda config: volumes.writable(config.volumes),
    snapshots=Archived(lambda config: trees(config, _home_inside(config)), partial(layer, start)),
)


def _warn(message: str) -> None:
    warnings.warn(message, HermitcrabWarning, stacklevel=2)
