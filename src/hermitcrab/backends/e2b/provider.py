"""E2B's sandboxes through its SDK, as `clouds.provider` wants them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from hermitcrab.backends.clouds import owned
from hermitcrab.backends.clouds.provider import Rented
from hermitcrab.backends.clouds.retry import Failure
from hermitcrab.backends.e2b import failures
from hermitcrab.backends.e2b.config import E2BConfig, RestoredConfig
from hermitcrab.backends.e2b.failures import GET_KEY, KEY, NAME, distinguished
from hermitcrab.core.protocols import Health

# The SDK takes most of a second to import, and is not always there.
if TYPE_CHECKING:
    from e2b import AsyncCommandHandle, AsyncSandbox, SandboxLifecycle

_INSTALL = "Install its SDK: pip install 'hermitcrab[e2b]'."


class Program:
    """A program in a sandbox."""

    def __init__(self, handle: AsyncCommandHandle[None]) -> None:
        self._handle = handle

    async def write(self, data: bytes) -> None:
        await distinguished(lambda: self._handle.send_stdin(data))

    async def close_stdin(self) -> None:
        await self._handle.close_stdin()

    async def wait(self) -> None:
        from e2b import CommandExitException

        try:
            await self._handle.wait()
        except CommandExitException:
            pass  # an end like any other

    async def kill(self) -> None:
        await self._handle.kill()


class Machine:
    """A sandbox."""

    def __init__(self, sandbox: AsyncSandbox, user: str, notes: list[str] | None = None) -> None:
        self.id = sandbox.sandbox_id
        self.notes = notes or []
        self._sandbox = sandbox
        self._user = user or None

    async def run(
        self, script: str, *, out: Callable[[bytes], None], err: Callable[[bytes], None]
    ) -> Program:
        handle = await distinguished(
            lambda: self._sandbox.commands.run(
                script,
                background=True,
                stdin=True,
                user=self._user,
                on_stdout=lambda text: out(text.encode("latin-1", "replace")),
                on_stderr=lambda text: err(text.encode()),
                timeout=0,
                retain_output=False,
            )
        )
        return Program(handle)

    async def extend(self, seconds: int) -> None:
        await self._sandbox.set_timeout(seconds)

    async def end(self) -> None:
        await self._sandbox.kill()


class E2B:
    """E2B's sandboxes and snapshots."""

    name, title, module = NAME, "E2B", "e2b"
    text = True
    """The SDK decodes what a program prints."""
    stays = True
    names = False

    def missing(self) -> Health | None:
        if importlib.util.find_spec(self.module) is None:
            return Health(False, "the Python package e2b is not installed", _INSTALL)
        return None if os.environ.get(KEY) else Health(False, f"{KEY} is not set", GET_KEY)

    async def greet(self) -> str:
        from e2b import AsyncSandbox

        await AsyncSandbox.list(limit=1).next_items(retries=0)
        return f"E2B takes the key in {KEY}"

    async def create(self, config: E2BConfig, *, life: int, labels: Mapping[str, str], key: str) -> Machine:
        from e2b import AsyncSandbox

        sandbox = await AsyncSandbox.create(
            (config.snapshot if isinstance(config, RestoredConfig) else "") or config.template,
            timeout=life,
            metadata=dict(labels),
            allow_internet_access=config.network,
            lifecycle=_lifecycle(config),
            idempotency_key=key,
            request_timeout=config.start_timeout,
        )
        return Machine(sandbox, config.user, await _other_than_asked(config, sandbox))

    async def again(self, config: E2BConfig, id: str, *, life: int) -> Machine | None:
        from e2b import AsyncSandbox, SandboxNotFoundException

        try:
            sandbox = await AsyncSandbox.connect(id, timeout=life, request_timeout=config.start_timeout)
        except SandboxNotFoundException:
            return None
        return Machine(sandbox, config.user)

    async def rented(self) -> list[Rented]:
        from e2b import AsyncSandbox, SandboxQuery

        pages, found = AsyncSandbox.list(query=SandboxQuery(metadata=dict(owned.MARK))), []
        while pages.has_next:
            found += [
                Rented(each.sandbox_id, each.template_id, each.metadata, each.started_at.timestamp())
                for each in await pages.next_items()
            ]
        return found

    async def remove(self, id: str) -> None:
        from e2b import AsyncSandbox

        await AsyncSandbox.kill(id)

    async def why_lost(self, id: str) -> str:
        from e2b import AsyncSandbox, SandboxNotFoundException, SandboxState

        try:
            info = await AsyncSandbox.get_info(id)
        except SandboxNotFoundException:
            return f"the sandbox {id} is gone at E2B: somebody ended it, or its time was over"
        return f"the sandbox {id} was paused at E2B" if info.state is SandboxState.PAUSED else ""

    async def keep(self, id: str, name: str) -> str:
        from e2b import AsyncSandbox

        return (await AsyncSandbox.create_snapshot(id, mode="filesystem")).snapshot_id

    async def kept(self, reference: str) -> bool:
        from e2b import AsyncSandbox

        found = await AsyncSandbox.list_snapshots(name=reference).next_items()
        return any(each.snapshot_id == reference for each in found)

    async def forget(self, reference: str) -> bool:
        from e2b import AsyncSandbox

        return await AsyncSandbox.delete_snapshot(reference)

    def understood(self, error: Exception) -> Failure:
        return failures.understood(error)


def _lifecycle(config: E2BConfig) -> SandboxLifecycle:
    """What is to be kept is not lost when nobody extends its life: it stays, paused, and is found again."""
    if config.persistent_filesystem:
        return {"on_timeout": {"action": "pause", "mode": "filesystem"}}
    return {"on_timeout": "kill"}


async def _other_than_asked(config: E2BConfig, sandbox: AsyncSandbox) -> list[str]:
    if config.cpu is None and config.memory is None:
        return []
    info = await sandbox.get_info()
    has = {"cpu": (config.cpu, info.cpu_count), "memory": (config.memory, info.memory_mb)}
    return [
        f"{key}: the template {config.template!r} has {given}, not {asked}; E2B sets it when one is built"
        for key, (asked, given) in has.items()
        if asked is not None and asked != given
    ]
