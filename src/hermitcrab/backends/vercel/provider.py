"""Vercel's sandboxes through its SDK, as `clouds.provider` wants them.

The SDK resumes a stopped sandbox by itself and starts a program there again. We speak to one session only,
for which it never does: a program that is gone with its session is noticed, and nothing runs twice.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING

from hermitcrab.backends.clouds import owned
from hermitcrab.backends.clouds.provider import Rented
from hermitcrab.backends.clouds.retry import Failure
from hermitcrab.backends.vercel import failures, sandboxes
from hermitcrab.backends.vercel.config import MEMORY_PER_CPU, NAME, VercelConfig, vcpus
from hermitcrab.backends.vercel.failures import GET_TOKEN, OIDC, OIDC_FILE, PROJECT, TEAM, TOKEN
from hermitcrab.backends.vercel.sandboxes import connected, new_client, session_of
from hermitcrab.core.protocols import Health

# The SDK takes most of a second to import, and is not always there.
if TYPE_CHECKING:
    from vercel.sandbox import Process, Sandbox, SandboxClient, TextReader

_INSTALL = "Install its SDK: pip install 'hermitcrab[vercel]'."
_LEAST_EXTENSION = 1.0


class Program:
    """A program in a session. When it has ended, the connections to it are closed."""

    def __init__(
        self,
        client: SandboxClient,
        sandbox: str,
        process: Process,
        out: Callable[[bytes], None],
        err: Callable[[bytes], None],
    ) -> None:
        self._client = client
        self._sandbox = sandbox
        self._process = process
        self._out, self._err = out, err

    async def write(self, data: bytes) -> None:
        """The SDK says how much went before, so that what it has to send again arrives once."""
        assert self._process.stdin is not None
        await self._process.stdin.send(data)

    async def close_stdin(self) -> None:
        assert self._process.stdin is not None
        await self._process.stdin.aclose()

    async def wait(self) -> None:
        streams = ((self._process.stdout, self._out), (self._process.stderr, self._err))
        try:
            await asyncio.gather(*(_follow(reader, heard) for reader, heard in streams))
        finally:
            await self._client.aclose()

    async def kill(self) -> None:
        async with connected() as client:
            sandbox = await sandboxes.found(client, self._sandbox)
            if sandbox is not None and sandbox.current_session_id == self._process.session_id:
                await (await session_of(sandbox).get_process(self._process.id)).kill()


async def _follow(reader: TextReader | None, heard: Callable[[bytes], None]) -> None:
    """By lines, which our agent prints: the SDK hands out nothing before it has all that was asked for."""
    assert reader is not None
    while line := await reader.readline():
        heard(line.encode("latin-1", "replace"))


class Machine:
    """A sandbox in one session."""

    def __init__(
        self, client: SandboxClient, sandbox: Sandbox, *, until: float, notes: list[str] | None = None
    ) -> None:
        """`until` is when its time is over, by our own clock."""
        self.id = sandbox.name
        self.notes = notes or []
        self._client = client
        self._session = session_of(sandbox)
        self._until = until

    async def run(
        self, script: str, *, out: Callable[[bytes], None], err: Callable[[bytes], None]
    ) -> Program:
        process = await self._session.create_process("sh", ["-c", script], stdin=subprocess.PIPE)
        return Program(self._client, self.id, process, out, err)

    async def extend(self, seconds: int) -> None:
        """Vercel is told what to add."""
        missing = time.monotonic() + seconds - self._until
        if missing > 0:
            added = max(missing, _LEAST_EXTENSION)
            async with connected() as client:  # also when the program has ended, and with it our own client
                sandbox = await client.get_sandbox(name=self.id)
                await session_of(sandbox).extend_execution_time_limit(added)
            self._until += added

    async def end(self) -> None:
        await self._client.aclose()
        await sandboxes.destroyed(self.id, ours=True)


class Vercel:
    """Vercel's sandboxes and snapshots."""

    name, title, module = NAME, "Vercel", "vercel.sandbox"
    text = True
    """Output comes in records of text, and a character that two of them share is lost."""
    stays = True
    names = False

    def missing(self) -> Health | None:
        if not _is_installed(self.module):
            return Health(False, "the Python package vercel-sandbox is not installed", _INSTALL)
        if os.environ.get(OIDC) or os.environ.get(OIDC_FILE):
            return None
        unset = [name for name in (TOKEN, TEAM, PROJECT) if not os.environ.get(name)]
        return Health(False, f"{unset[0]} is not set", GET_TOKEN) if unset else None

    async def greet(self) -> str:
        async with connected() as client:
            async for _ in client.query_sandboxes(page_size=1):
                break
        return f"Vercel takes the token in {failures.token_used()}"

    async def create(
        self, config: VercelConfig, *, life: int, labels: Mapping[str, str], key: str
    ) -> Machine:
        until = time.monotonic() + life
        async with AsyncExitStack() as stack:
            client = new_client()
            stack.push_async_callback(client.aclose)
            sandbox = await sandboxes.created(
                client, config, name=f"hermitcrab-{key}", life=life, labels=labels
            )
            stack.pop_all()  # the machine has the client now
            return Machine(client, sandbox, until=until, notes=_other_than_asked(config, sandbox))

    async def again(self, config: VercelConfig, id: str, *, life: int) -> Machine | None:
        from vercel.sandbox import SandboxApiError

        async with AsyncExitStack() as stack:
            client = new_client()
            stack.push_async_callback(client.aclose)
            there = await sandboxes.found(client, id)
            sandbox = there and await sandboxes.running(client, there)
            if sandbox is None:
                await sandboxes.destroyed(id)
                return None
            machine = Machine(client, sandbox, until=time.monotonic() + sandboxes.seconds_left(sandbox))
            with suppress(SandboxApiError):  # what is left will do, and is extended again soon
                await machine.extend(life)
            stack.pop_all()
            return machine

    async def rented(self) -> list[Rented]:
        from vercel.sandbox import SandboxQueryByCreatedAt, TagFilter

        ((key, value),) = owned.MARK.items()
        query = SandboxQueryByCreatedAt(tag=TagFilter(key=key, value=value))
        async with connected() as client:
            return [
                Rented(each.name, each.image or "", each.tags or {}, (each.created_at or 0) / 1000)
                async for each in client.query_sandboxes(query=query)
            ]

    async def remove(self, id: str) -> None:
        await sandboxes.destroyed(id)

    async def why_lost(self, id: str) -> str:
        from vercel.sandbox import SandboxStatus

        async with connected() as client:
            sandbox = await sandboxes.found(client, id)
        if sandbox is None:
            return f"the sandbox {id} is gone at Vercel: somebody removed it"
        status = sandboxes.status(sandbox)
        if status is SandboxStatus.RUNNING:
            return ""
        return f"the sandbox {id} is {status} at Vercel: somebody stopped it, or its time was over"

    async def keep(self, id: str, name: str) -> str:
        async with connected() as client:
            return await sandboxes.saved(client, id)

    async def kept(self, reference: str) -> bool:
        async with connected() as client:
            return await sandboxes.snapshot_of(client, reference) is not None

    async def forget(self, reference: str) -> bool:
        async with connected() as client:
            snapshot = await sandboxes.snapshot_of(client, reference)
            if snapshot is not None:
                await snapshot.delete()
        return snapshot is not None

    def understood(self, error: Exception) -> Failure:
        return failures.understood(error)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False


def _other_than_asked(config: VercelConfig, sandbox: Sandbox) -> list[str]:
    cpus = vcpus(config)
    if cpus is None:
        return []
    has = {"cpu": (cpus, sandbox.vcpus), "memory": (cpus * MEMORY_PER_CPU, sandbox.memory)}
    return [
        f"{key}: Vercel gave {given}, not {asked}"
        for key, (asked, given) in has.items()
        if given is not None and asked != given
    ]
