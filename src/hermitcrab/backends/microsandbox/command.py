"""microVMs through the command `msb`, where the SDK cannot be imported."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from hermitcrab.backends.microsandbox.engine import (
    PAUSED,
    RUNNING,
    SNAPSHOTS,
    STOP_SECONDS,
    Hear,
    Order,
    Vm,
    keeps_attributes,
)
from hermitcrab.backends.microsandbox.failures import Refused

PATH_VARIABLE = "MSB_PATH"
_READ_SIZE = 1 << 18
_NONE = " not found"
"""How it says that there is no such VM or snapshot."""


def create_flags(order: Order) -> list[str]:
    """Everything between `msb create` and the image."""
    disk = [] if order.config.disk is None else ["--root-disk", f"{order.config.disk}M"]
    return [*_limits(order), *_labels(order.labels), *disk]


def restore_flags(order: Order) -> list[str]:
    """Everything between `msb restore` and the snapshot. It takes no labels."""
    return _limits(order)


def _limits(order: Order) -> list[str]:
    config = order.config
    flags = [
        *("--quiet", "--name", order.name, "--idle-timeout", f"{order.idle}s"),
        *([] if config.network else ["--no-net"]),
        *(["--user", config.user] if config.user else []),
    ]
    if config.cpu is not None:
        flags += ["--cpus", str(config.cpu)]
    if config.memory is not None:
        flags += ["--memory", f"{config.memory}M"]
    if config.max_duration is not None:
        flags += ["--max-duration", f"{math.ceil(config.max_duration)}s"]
    for mount in order.mounts:
        metadata = "stat-virt=relaxed,host-perms=mirror" if keeps_attributes(mount) else "stat-virt=off"
        writable = "ro" if mount.read_only else "rw"
        flags += ["--volume", f"{mount.source}:{mount.target}:{writable},{metadata}"]
    return flags


def _labels(labels: Mapping[str, str]) -> list[str]:
    return [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]


class Program:
    """A program in a VM: a running `msb exec`."""

    def __init__(self, process: Process, out: Hear, err: Hear) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        self._process = process
        self._listening = asyncio.gather(_pump(process.stdout, out), _pump(process.stderr, err))

    async def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        await self._process.stdin.drain()

    async def close_stdin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def wait(self) -> None:
        await asyncio.shield(self._listening)
        await self._process.wait()

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()


class Msb:
    """An `Engine`."""

    module = "asyncio.subprocess"

    @property
    def msb(self) -> str:
        return os.environ.get(PATH_VARIABLE) or shutil.which("msb") or ""

    async def create(self, order: Order) -> None:
        await self._ask("create", *create_flags(order), "--", order.config.image)

    async def restore(self, order: Order, snapshot: str) -> None:
        await self._ask("restore", *restore_flags(order), "--", snapshot)
        await self._ask("modify", *_labels(order.labels), order.name)

    async def find(self, name: str) -> Vm | None:
        try:
            return _vm(json.loads(await self._ask("inspect", "--format", "json", name)))
        except Refused as error:
            if _NONE not in str(error):
                raise
            return None

    async def every(self, labels: Mapping[str, str]) -> list[Vm]:
        listed = json.loads(await self._ask("list", "--format", "json", *_labels(labels)))
        found = [await self.find(each["name"]) for each in listed]
        return [vm for vm in found if vm is not None]

    async def wake(self, vm: Vm) -> None:
        if vm.status == PAUSED:
            await self._ask("resume", vm.name)
        elif vm.status != RUNNING:
            await self._ask("start", vm.name)

    async def run(self, name: str, script: str, out: Hear, err: Hear) -> Program:
        # A session of its own, so that what is typed here does not end it.
        process = await asyncio.create_subprocess_exec(
            *(self.msb, "exec", "--quiet", "--stream", name, "--", "sh", "-c", script),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        return Program(process, out, err)

    async def touch(self, name: str) -> None:
        await self._ask("touch", name)

    async def stop(self, name: str) -> None:
        vm = await self.find(name)
        if vm is not None and vm.status == RUNNING:
            try:
                await self._ask("stop", "--timeout", str(STOP_SECONDS), name)
            except Refused:
                await self._ask("stop", "--force", name)

    async def remove(self, name: str) -> None:
        await self._there("remove", "--force", name)

    async def keep(self, name: str, member: str) -> str:
        await self._ask("snapshot", "create", "--quiet", "--sandbox", name, "--group", SNAPSHOTS, member)
        return f"{SNAPSHOTS}:{member}"

    async def kept(self, reference: str) -> bool:
        return await self._there("snapshot", "inspect", reference)

    async def forget(self, reference: str) -> bool:
        return await self._there("snapshot", "remove", reference)

    async def _there(self, *words: str) -> bool:
        try:
            await self._ask(*words)
        except Refused as error:
            if _NONE not in str(error):
                raise
            return False
        return True

    async def _ask(self, *words: str) -> str:
        """What it prints; `Refused` with what it complained about."""
        process = await asyncio.create_subprocess_exec(
            self.msb, *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, start_new_session=True
        )
        try:
            out, err = await process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        if process.returncode != 0:
            raise Refused(complaint(err.decode(errors="replace")) or f"msb {words[0]} failed")
        return out.decode(errors="replace")


def complaint(said: str) -> str:
    """`error: ...` and the lines below it, as one line."""
    lines = [re.sub(r"^(error:|→)\s*", "", line.strip()) for line in said.splitlines()]
    return "; ".join(filter(None, lines))


async def _pump(stream: asyncio.StreamReader, hear: Hear) -> None:
    while data := await stream.read(_READ_SIZE):
        hear(data)


def _vm(told: Mapping[str, Any]) -> Vm:
    created = datetime.fromisoformat(told["created_at"]).timestamp() if told.get("created_at") else 0.0
    return Vm(told["name"], str(told["status"]).lower(), told["config"], created)
