"""Containers that outlive a program: found again by their task, and joined while they still fit."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from hermitcrab.backends.docker import owners, postmortem
from hermitcrab.backends.docker.config import DockerConfig
from hermitcrab.backends.docker.engine import Engine, warn
from hermitcrab.backends.docker.flags import AGENT, Host, Image, label_flags, run_flags
from hermitcrab.backends.docker.owners import Fate, Found
from hermitcrab.backends.volumes import Mount
from hermitcrab.core.agent import AgentSandbox, Attachment, launched
from hermitcrab.core.client import ClientProgram
from hermitcrab.errors import SandboxStartError

SOCKET = "/run/.hermitcrab/agent"
_TAKEN = ("already in use", "is in use")
_NOT_YET = "nobody serves"
_START_PATIENCE = 60.0
_ATTEMPTS = 20
_PAUSE_POLL = 0.2


async def join(
    engine: Engine, config: DockerConfig, host: Host, image: Image, mounts: Sequence[Mount], binary: Path
) -> AgentSandbox:
    """The task's container: the one that is there when it fits, else a new one in its place."""
    wanted = fingerprint(config, host, image, mounts)
    ours = False
    for attempt in range(_ATTEMPTS):
        there = await asyncio.to_thread(_fitting, engine, config, wanted)
        try:
            if there is None:
                flags = [*run_flags(config, host, image, mounts), *Mount(str(binary), AGENT, True).flags]
                there = await asyncio.to_thread(_create, engine, config, wanted, flags)
                ours = True
            sandbox = await _attach(engine, config, there)
            sandbox.joined = not ours
            return sandbox
        except SandboxStartError as error:
            # Another program was quicker, or the agent is not ready.
            passing = any(words in str(error) for words in (*_TAKEN, _NOT_YET))
            if not passing or attempt == _ATTEMPTS - 1:
                raise
    raise AssertionError("unreachable")


async def rejoin(engine: Engine, config: DockerConfig) -> AgentSandbox | None:
    """The task's container as it is, whatever it was made with; None when none runs."""
    for there in await asyncio.to_thread(_awake, engine, config.task_id):
        if there.state == "running":
            sandbox = await _attach(engine, config, there)
            sandbox.joined = True
            return sandbox
    return None


def fingerprint(config: DockerConfig, host: Host, image: Image, mounts: Sequence[Mount]) -> str:
    """Of what was asked for, whatever of it the engine can do."""
    asked = run_flags(config, replace(host, refuses=frozenset()), image, mounts)
    return owners.fingerprint(image=image.id, flags=asked)


def container_name(task: str, user: str) -> str:
    """One for all programs of a user, so that two of them cannot make two."""
    return f"hermitcrab-{task}-{hashlib.sha256(f'{user}/{task}'.encode()).hexdigest()[:8]}"


def this_user() -> str:
    return f"{os.getuid()}@{platform.node()}"


def _fitting(engine: Engine, config: DockerConfig, wanted: str) -> Found | None:
    found = _awake(engine, config.task_id)
    fate, names = owners.fate(found, wanted)
    if fate is Fate.REPLACE:
        engine.remove(names)
    there = next((each for each in found if fate is Fate.REUSE and each.name == names[0]), None)
    if there is not None:
        # What it lacks since its start is to be said again.
        engine.refuses |= set(filter(None, there.labels.get(owners.LACKS, "").split(",")))
    return there


def _awake(engine: Engine, task: str) -> list[Found]:
    """The task's containers. An engine makes one stand still while it keeps a snapshot of it."""
    deadline = time.monotonic() + _START_PATIENCE
    while True:
        found = engine.containers(**{owners.TASK: task, owners.USER: this_user()})
        paused = [each.name for each in found if each.state == owners.PAUSED]
        if not paused:
            return found
        if time.monotonic() > deadline:
            raise SandboxStartError(
                f"the container of task {task!r} is paused; `{engine.kind.name} unpause {paused[0]}`",
                backend=engine.kind.name,
            )
        time.sleep(_PAUSE_POLL)


def _create(engine: Engine, config: DockerConfig, wanted: str, flags: Sequence[str]) -> Found:
    name = container_name(config.task_id, this_user())
    labels = {
        **config.labels,
        **owners.labels(owners.DETACHED),
        owners.TASK: config.task_id,
        owners.USER: this_user(),
        owners.FINGERPRINT: wanted,
        owners.TOKEN: secrets.token_hex(16),
        owners.LACKS: ",".join(sorted(engine.refuses)),
    }
    run = ["run", "--detach", "--rm", "--pull", "never", "--name", name, *label_flags(labels), *flags]
    lease = ["--lease", f"{config.max_lifetime:.0f}"]
    inside = ["--entrypoint", AGENT, config.runs_from, "--serve", SOCKET, *lease]
    for warning in engine.tell(*run, *inside, patience=_START_PATIENCE).warnings:
        warn(engine.kind, warning)
    return Found(name, config.image, "running", "", labels)


async def _attach(engine: Engine, config: DockerConfig, there: Found) -> AgentSandbox:
    argv = [engine.path, "exec", "--interactive", there.name, AGENT, "--connect", SOCKET]
    autopsy = partial(postmortem.examine, engine, there.name, time.time(), config.memory)
    program = ClientProgram(argv, os.environ, release=partial(engine.remove, [there.name]))
    link = launched(engine.kind.name, program)
    token = bytes.fromhex(there.labels[owners.TOKEN])
    attachment = Attachment(token, config.max_lifetime)
    sandbox = await AgentSandbox.over(engine.kind.name, link, autopsy=autopsy, attachment=attachment)
    sandbox.name = there.name
    return sandbox
