"""microVMs through microsandbox's Python SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hermitcrab.backends.microsandbox.config import MicrosandboxConfig
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
from hermitcrab.backends.volumes import Mount

# It is not always there.
if TYPE_CHECKING:
    from microsandbox import ExecHandle, MountConfig, Sandbox, SandboxHandle


class Program:
    """A program in a VM."""

    def __init__(self, handle: ExecHandle, out: Hear, err: Hear) -> None:
        self._handle = handle
        self._stdin = handle.take_stdin()
        self._listening = asyncio.create_task(self._listen(out, err))

    async def write(self, data: bytes) -> None:
        assert self._stdin is not None
        await self._stdin.write(data)

    async def close_stdin(self) -> None:
        assert self._stdin is not None
        await self._stdin.close()

    async def wait(self) -> None:
        await asyncio.shield(self._listening)

    async def kill(self) -> None:
        await self._handle.kill()

    async def _listen(self, out: Hear, err: Hear) -> None:
        from microsandbox import ExecEventType, ExecFailedError

        async for event in self._handle:
            if event.event_type == ExecEventType.STDOUT:
                out(event.data or b"")
            elif event.event_type == ExecEventType.STDERR:
                err(event.data or b"")
            elif event.event_type == ExecEventType.FAILED:
                raise ExecFailedError((event.data or b"it cannot be started").decode(errors="replace"))


class Sdk:
    """An `Engine`."""

    module = "microsandbox"

    @property
    def msb(self) -> str:
        from microsandbox import resolve_runtime

        return resolve_runtime().msb_path

    async def create(self, order: Order) -> None:
        from microsandbox import Image, Network, Sandbox

        config = order.config
        made = await Sandbox.create(
            order.name,
            image=config.image if config.disk is None else Image.oci(config.image, root_disk=config.disk),
            labels=dict(order.labels),
            network=None if config.network else Network.none(),
            detached=True,
            **_limits(order),
        )
        await made.detach()  # or it would end with this object

    async def restore(self, order: Order, snapshot: str) -> None:
        from microsandbox import NetworkPolicy, Sandbox

        made = await Sandbox.restore(
            snapshot,
            name=order.name,
            network_policy=None if order.config.network else NetworkPolicy.none(),
            **_limits(order),
        )
        await made.modify(labels=dict(order.labels))
        await made.detach()

    async def find(self, name: str) -> Vm | None:
        from microsandbox import Sandbox, SandboxNotFoundError

        try:
            return _vm(await Sandbox.get(name))
        except SandboxNotFoundError:
            return None

    async def every(self, labels: Mapping[str, str]) -> list[Vm]:
        from microsandbox import Sandbox

        found: list[Vm] = []
        cursor = None
        while True:
            page = await Sandbox.list_with(cursor=cursor, labels=labels)
            found += map(_vm, page.sandboxes)
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def wake(self, vm: Vm) -> None:
        from microsandbox import Sandbox

        handle = await Sandbox.get(vm.name)
        if vm.status == PAUSED:
            await handle.resume()
        elif vm.status != RUNNING:
            await (await handle.connect_or_start(detached=True)).detach()

    async def run(self, name: str, script: str, out: Hear, err: Hear) -> Program:
        from microsandbox import Stdin

        sandbox = await _entered(name)
        return Program(await sandbox.exec_stream("sh", ["-c", script], stdin=Stdin.pipe()), out, err)

    async def touch(self, name: str) -> None:
        from microsandbox import Sandbox

        await (await Sandbox.get(name)).touch()

    async def stop(self, name: str) -> None:
        from microsandbox import Sandbox, SandboxNotFoundError, SandboxNotRunningError, StopTimeoutError

        try:
            handle = await Sandbox.get(name)
            try:
                await handle.stop(timeout=STOP_SECONDS)
            except StopTimeoutError:
                await handle.kill()
        except (SandboxNotFoundError, SandboxNotRunningError):
            pass

    async def remove(self, name: str) -> None:
        from microsandbox import Sandbox, SandboxNotFoundError

        try:
            await (await Sandbox.get(name)).destroy(force=True)
        except SandboxNotFoundError:
            pass

    async def keep(self, name: str, member: str) -> str:
        from microsandbox import Snapshot

        await Snapshot.create(member, from_sandbox=name, group=SNAPSHOTS)
        return f"{SNAPSHOTS}:{member}"

    async def kept(self, reference: str) -> bool:
        from microsandbox import Snapshot

        try:
            await Snapshot.get(reference)
        except FileNotFoundError:
            return False
        return True

    async def forget(self, reference: str) -> bool:
        from microsandbox import Snapshot

        try:
            await Snapshot.remove(reference)
        except FileNotFoundError:
            return False
        return True


async def _entered(name: str) -> Sandbox:
    from microsandbox import Sandbox

    return await (await Sandbox.get(name)).connect()


def _limits(order: Order) -> dict[str, Any]:
    """What is said of a new VM and of a restored one alike."""
    config: MicrosandboxConfig = order.config
    return {
        "cpus": config.cpu,
        "memory": config.memory,
        "max_duration": config.max_duration,
        "idle_timeout": float(order.idle),
        "user": config.user or None,
        "volumes": {mount.target: _volume(mount) for mount in order.mounts},
    }


def _volume(mount: Mount) -> MountConfig:
    """Files have the modes there that they have here, and any file system will do."""
    from microsandbox import HostPermissions, StatVirtualization, Volume

    if not keeps_attributes(mount):
        return Volume.bind(mount.source, readonly=mount.read_only, stat_virtualization=StatVirtualization.OFF)
    return Volume.bind(
        mount.source,
        readonly=mount.read_only,
        stat_virtualization=StatVirtualization.RELAXED,
        host_permissions=HostPermissions.MIRROR,
    )


def _vm(handle: SandboxHandle) -> Vm:
    config = json.loads(handle.config_json)
    return Vm(handle.name, str(handle.status), config, (handle.created_at or 0) / 1000)
