"""Docker and Podman: one hardened container for the life of an environment."""

from __future__ import annotations

import asyncio
import os
import platform
import re
import resource
import secrets
import sys
import threading
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from hermitcrab.agent.program import binary_for_sandbox
from hermitcrab.agent.wire import Feature
from hermitcrab.backends.data import data_directory
from hermitcrab.backends.docker import config as settings
from hermitcrab.backends.docker import networks, owners, postmortem, tasks
from hermitcrab.backends.docker.config import DockerConfig
from hermitcrab.backends.docker.engine import Engine, warn
from hermitcrab.backends.docker.engine_text import DOCKER, Kind, is_local, warned
from hermitcrab.backends.docker.engine_text import PODMAN as PODMAN_KIND
from hermitcrab.backends.docker.flags import (
    AGENT,
    Host,
    Image,
    home_inside,
    label_flags,
    named,
    refused,
    run_flags,
    unmet,
)
from hermitcrab.backends.docker.snapshots import ContainerSnapshots
from hermitcrab.backends.given import carried_mounts
from hermitcrab.backends.volumes import Mount, writable
from hermitcrab.core import delivery, plain
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Health, Listed, Luggage, Traits
from hermitcrab.errors import BackendUnavailable, SandboxError, SandboxStartError, UnsupportedCapability

_SWEEP_AFTER = 0.3
"""Seconds: the first result comes first."""


async def start(kind: Kind, config: DockerConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    settings.refuse(config)
    if luggage.mounts and not is_local(kind, os.environ):
        raise UnsupportedCapability(
            "credentials, skills and caches: this engine runs elsewhere and cannot mount files of this "
            "machine; leave them behind with carry_off, or use ssh",
            backend=kind.name,
        )
    engine = Engine.find(kind)
    mounts = settings.mounts(
        config,
        data=data_directory(os.environ) / kind.name,
        environ=os.environ,
        local=is_local(kind, os.environ),
    )
    image = await _image(engine, config)
    mounts += _carried(kind, config, _host(engine), image, mounts, luggage)
    while True:
        try:
            sandbox = await _run(engine, config, _host(engine), image, mounts)
            break
        except SandboxStartError as error:
            setting = _turned_down(str(error))
            if setting and setting not in engine.refuses:
                engine.refuses.add(setting)
            elif re.search(_GONE_IMAGE, str(error)) and engine.forget(config.image, config.platform):
                image = await _image(engine, config)
            else:
                raise await asyncio.to_thread(_explained, engine, error) from error
    try:
        for shortfall in [*unmet(config, _host(engine)), *warned(sandbox.said), *_weaker(sandbox)]:
            warn(kind, shortfall)
    except BaseException:
        # Where warnings are errors.
        await sandbox.release()
        raise
    _sweep_later(engine)
    return sandbox


def _carried(
    kind: Kind, config: DockerConfig, host: Host, image: Image, mounts: Sequence[Mount], luggage: Luggage
) -> list[Mount]:
    taken = {mount.target for mount in mounts}
    return carried_mounts(luggage.mounts, home_inside(config, host, image), taken=taken, backend=kind.name)


def _weaker(sandbox: AgentSandbox) -> list[str]:
    """What the kernel beneath the container, gVisor's perhaps, does not let the agent promise."""
    hello = sandbox.hello
    if not hello or not hello.pid or hello.features & Feature.SUBREAPER:
        return []
    return ["this kernel has no child subreapers: a process that detaches itself twice outlives a time-out"]


def check(kind: Kind) -> Health:
    try:
        engine = Engine.find(kind)
        version = engine.version()
    except BackendUnavailable as error:
        return Health(False, str(error).removesuffix(error.hint).strip(), error.hint)
    except SandboxError as error:
        return Health(False, str(error), kind.begin)
    slow = "" if binary_for_sandbox(platform.machine()) else "; without an agent: each command is an `exec`"
    return Health(True, f"{kind.title} {version} answers ({engine.path}){slow}")


def sandboxes(kind: Kind) -> list[Listed]:
    """Every container of ours that the engine has."""
    return [_listed(each) for each in Engine.find(kind).containers()]


def reap(kind: Kind) -> list[Listed]:
    """Remove the containers whose owners are dead on this machine."""
    engine = Engine.find(kind)
    found = engine.containers()
    gone = set(engine.remove(owners.orphans(found)))
    return [_listed(each) for each in found if each.name in gone]


async def rejoin(kind: Kind, config: DockerConfig) -> AgentSandbox | None:
    return await tasks.rejoin(Engine.find(kind), config)


async def set_network(kind: Kind, sandbox: AgentSandbox, allowed: bool) -> None:
    await asyncio.to_thread(networks.change, Engine.find(kind), sandbox.name, allowed)


def end_task(kind: Kind, task: str) -> bool:
    """Remove what runs for a task of this user."""
    engine = Engine.find(kind)
    found = engine.containers(**{owners.TASK: task, owners.USER: tasks.this_user()})
    return bool(engine.remove(each.name for each in found))


_TRAITS = Traits(
    isolated=True, network="own", creates_cwd=True, carries="mounts", workspace=settings.WORKSPACE
)


def _backend(kind: Kind, summary: str) -> Backend[DockerConfig]:
    return Backend(
        name=kind.name,
        summary=summary,
        config=DockerConfig,
        traits=_TRAITS,
        start=partial(start, kind),
        check=partial(check, kind),
        target="image",
        exposes=lambda config: config.auto_mount_cwd or writable(config.volumes),
        sandboxes=partial(sandboxes, kind),
        reap=partial(reap, kind),
        rejoin=partial(rejoin, kind),
        set_network=partial(set_network, kind),
        end_task=partial(end_task, kind),
        snapshots=ContainerSnapshots(kind),
    )


BACKEND = _backend(DOCKER, "a hardened container per session, by Docker")
PODMAN = _backend(PODMAN_KIND, "a hardened container per session, by Podman, with or without root")

_GONE_IMAGE = r"[Nn]o such image|image not known|Unable to find image"
_MOUNTED_AGENT = "a mounted agent"


async def _run(
    engine: Engine, config: DockerConfig, host: Host, image: Image, mounts: Sequence[Mount]
) -> AgentSandbox:
    """A container with the agent mounted or, where the engine cannot see it, sent over the pipe."""
    kind, binary, lease = engine.kind, binary_for_sandbox(image.machine), config.max_lifetime
    flags = run_flags(config, host, image, mounts)
    if binary is not None and _MOUNTED_AGENT not in host.refuses:
        if config.task_id:
            return await tasks.join(engine, config, host, image, mounts, binary)
        mounted = [*flags, *Mount(str(binary), AGENT, read_only=True).flags]
        name, program = _container(engine, config, mounted, [AGENT, "--lease", f"{lease:.0f}"])
        return await _named(name, AgentSandbox.start(kind.name, program, lease=lease))
    if config.task_id:
        warn(kind, "task_id: the agent cannot be mounted, so the container ends with this program")
    try:
        install = ["bash", "-c", delivery.install_script(lease=lease)]
        name, program = _container(engine, config, flags, install)
        return await _named(name, delivery.start(kind.name, program, lease=lease))
    except delivery.NoAgent as none:
        warn(kind, f"{none}; each command costs an `exec` of its own, and starts more slowly")
    name, lifeline = _container(engine, config, flags, plain.FAR_END)
    enter = [engine.path, "exec", "--interactive", name]
    starting = plain.start(kind.name, lambda argv: ClientProgram([*enter, *argv], os.environ), lifeline)
    return await _named(name, starting)


async def _named(name: str, starting: Awaitable[AgentSandbox]) -> AgentSandbox:
    try:
        sandbox = await starting
    except SandboxStartError as error:
        error.sandbox_id = name
        raise
    sandbox.name = name
    return sandbox


def _container(
    engine: Engine, config: DockerConfig, flags: Sequence[str], inside: Sequence[str]
) -> tuple[str, ClientProgram]:
    """A name, and the program that runs `inside` in a container of that name and is its pipe."""
    name = f"hermitcrab-{secrets.token_hex(8)}"
    task = {owners.TASK: config.task_id} if config.task_id else {}
    labels = label_flags({**config.labels, **owners.labels(owners.ATTACHED), **task})
    run = [engine.path, *["run", "--interactive", "--rm", "--pull", "never", "--name"], name, *labels, *flags]
    argv = [*run, "--entrypoint", inside[0], config.runs_from, *inside[1:]]
    autopsy = partial(postmortem.examine, engine, name, time.time(), config.memory)
    return name, ClientProgram(argv, os.environ, autopsy=autopsy)


def _turned_down(message: str) -> str:
    """What a failed start was about, when the next can do without it."""
    return _MOUNTED_AGENT if AGENT in message or "agent-linux-" in message else refused(message)


async def _image(engine: Engine, config: DockerConfig) -> Image:
    image = await asyncio.to_thread(engine.image, config.image, pull=config.pull, platform=config.platform)
    name = "" if config.run_as_host_user else named(config.user or image.user)
    person = await asyncio.to_thread(engine.person, image, name) if name else None
    return replace(image, people={name: person}) if person else image


def _host(engine: Engine) -> Host:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounded = sys.platform == "linux" and most != resource.RLIM_INFINITY
    return Host(
        engine=engine.kind.name,
        rootless=engine.kind is PODMAN_KIND and os.geteuid() != 0,
        uid=os.getuid(),
        gid=os.getgid(),
        open_files=most if bounded else None,
        refuses=frozenset(engine.refuses),
    )


def _explained(engine: Engine, error: SandboxStartError) -> SandboxError:
    """The engine's own words made clear; when it said nothing, whether it answers at all."""
    if error.__class__ is not SandboxStartError:
        return error
    if "no agent answered" in str(error):
        try:
            # It may have been made and not been started, which is not undone by itself.
            engine.remove([error.sandbox_id])
        except BackendUnavailable as unavailable:
            return unavailable
    if re.search(r'exec:? "?bash"?: .*not found', str(error)):
        return SandboxStartError(
            "there is no bash in the image, and hermitcrab needs one", backend=error.backend
        )
    return engine.understood(str(error))


def _sweep_later(engine: Engine) -> None:
    """Once in a program's life, on a thread that nobody has to wait for."""
    if not engine.swept:
        engine.swept = True
        sweep = threading.Thread(target=_sweep, args=(engine,), name="hermitcrab-reap", daemon=True)
        asyncio.get_running_loop().call_later(_SWEEP_AFTER, sweep.start)


def _sweep(engine: Engine) -> None:
    with suppress(SandboxError):
        engine.remove(owners.orphans(engine.containers()))


def _listed(found: owners.Found) -> Listed:
    owner = found.owner
    living = owners.alive(owner) if owner else None
    whose = "elsewhere" if owner is None or living is None else f"pid {owner.pid}"
    began = datetime.fromisoformat(found.created)
    return Listed(
        id=found.name,
        detail=found.image,
        task=found.task,
        owner=whose,
        orphaned=bool(owners.orphans([found])),
        age=(datetime.now(UTC) - began).total_seconds(),
    )
