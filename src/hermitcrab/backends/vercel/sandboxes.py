"""A sandbox at Vercel from its creation to its end, and its snapshots, by the calls of the SDK.

A sandbox is a name, its settings and its files; a session is one life of its machine. A snapshot ends a
session, and the next one begins with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from hermitcrab.backends.clouds.kept import known
from hermitcrab.backends.vercel.config import MEMORY_PER_CPU, NAME, RestoredConfig, VercelConfig, image, vcpus
from hermitcrab.errors import SandboxLost, StoreError

# The SDK takes most of a second to import, and is not always there.
if TYPE_CHECKING:
    from vercel.sandbox import Sandbox, SandboxClient, SandboxRuntimeSession, SandboxStatus, Snapshot

URL = "VERCEL_SANDBOX_API_URL"
"""Where the API is, if not at Vercel. The SDK itself has no variable for it."""
_POLL_SECONDS = 0.5
_UNCLAIMED = timedelta(days=365)
"""How long Vercel keeps what it saves by itself of a persistent one that stopped. What we save stays: that is
how the two are told apart."""
_NOT_FOUND, _TAKEN, _NOTHING_TO_RESUME = 404, 409, "snapshot_not_found"


def new_client() -> SandboxClient:
    from vercel.sandbox import SandboxClient, SandboxServiceOptions

    return SandboxClient.create(options=SandboxServiceOptions(base_url=os.environ.get(URL)))


@asynccontextmanager
async def connected() -> AsyncIterator[SandboxClient]:
    client = new_client()
    try:
        yield client
    finally:
        await client.aclose()


async def created(
    client: SandboxClient, config: VercelConfig, *, name: str, life: int, labels: Mapping[str, str]
) -> Sandbox:
    """One that is running. The same name again is the same sandbox."""
    from vercel.sandbox import (
        NetworkPolicy,
        SandboxApiError,
        SandboxResources,
        SandboxTerminalStateError,
        SnapshotSource,
    )

    restored = config.snapshot if isinstance(config, RestoredConfig) else ""
    cpus, persistent = vcpus(config), config.persistent_filesystem
    try:
        return await client.create_sandbox(
            name=name,
            image=image(config),
            source=SnapshotSource(snapshot_id=restored) if restored else None,
            execution_time_limit=life,
            resources=SandboxResources(vcpus=cpus, memory=cpus * MEMORY_PER_CPU) if cpus else None,
            persistent=persistent,
            snapshot_expiration=_UNCLAIMED if persistent else None,
            network_policy=None if config.network else NetworkPolicy.deny_all(),
            tags=dict(labels),
        )
    except SandboxTerminalStateError:
        with suppress(SandboxApiError):  # it costs nothing, and is found by `reap` if it stays
            await destroyed(name)
        raise
    except SandboxApiError as error:
        if error.status_code != _TAKEN:
            raise
        # Nobody else knows the name: an attempt before this one was heard.
        return await _up(client, await client.get_sandbox(name=name))


async def found(client: SandboxClient, name: str) -> Sandbox | None:
    from vercel.sandbox import SandboxApiError

    try:
        return await client.get_sandbox(name=name)
    except SandboxApiError as error:
        if error.status_code != _NOT_FOUND:
            raise
        return None


async def running(client: SandboxClient, sandbox: Sandbox) -> Sandbox | None:
    """The same with a machine; None when that would begin without the files that it had."""
    from vercel.sandbox import SandboxApiError, SandboxStatus

    sandbox = await _settled(client, sandbox)
    if status(sandbox) is SandboxStatus.RUNNING:
        return sandbox
    if await _last_saved(client, sandbox) is None:
        return None
    try:
        resumed = await client.resume_sandbox(name=sandbox.name)
    except SandboxApiError as error:
        if error.code != _NOTHING_TO_RESUME:
            raise
        return None
    return await _up(client, resumed)


async def saved(client: SandboxClient, name: str) -> str:
    """A snapshot of its files as they are. Its machine is stopped then."""
    sandbox = await _settled(client, await client.get_sandbox(name=name))
    last = await _last_saved(client, sandbox)
    if last is not None and last.expires_at is None:
        return last.id  # made by an attempt before this one, whose answer was lost
    active = await running(client, sandbox)
    if active is None:
        raise SandboxLost(f"the sandbox {name} stopped at Vercel, and its files are gone", backend=NAME)
    snapshot = await session_of(active).snapshot(expiration=0)
    await _settled(client, await client.get_sandbox(name=name))
    return snapshot.id


async def snapshot_of(client: SandboxClient, id: str) -> Snapshot | None:
    from vercel.sandbox import SandboxApiError

    try:
        snapshot = await client.get_snapshot(snapshot_id=id)
    except SandboxApiError as error:
        if error.status_code != _NOT_FOUND and error.code != _NOTHING_TO_RESUME:
            raise
        return None
    return snapshot if snapshot.status == "created" else None


async def destroyed(name: str, *, ours: bool = False) -> None:
    """Vercel stops it first. Of its snapshots those stay that we made; where it is surely of this user, those
    that this user knows of: a program that was killed while it made one did not learn its id."""
    from vercel.sandbox import SandboxApiError

    async with connected() as client:
        sandbox = await found(client, name)
        if sandbox is None:
            return
        try:
            unclaimed = await _unclaimed(sandbox, ours=ours)
            await sandbox.destroy()
            for each in unclaimed:
                await each.delete()
        except SandboxApiError as error:
            if error.status_code != _NOT_FOUND:
                raise


async def _unclaimed(sandbox: Sandbox, *, ours: bool) -> list[Snapshot]:
    """What Vercel saved by itself; from now on it saves nothing more."""
    if not sandbox.persistent:
        return []
    await sandbox.update(persistent=False)
    found = await sandbox.list_snapshots()
    if not ours:
        return [each for each in found if each.expires_at is not None]
    try:
        claimed = await asyncio.to_thread(known, NAME)
    except StoreError:
        return []  # nobody can say
    return [each for each in found if each.id not in claimed]


def session_of(sandbox: Sandbox) -> SandboxRuntimeSession:
    assert sandbox.current_session is not None, "whoever asks for a sandbox by its name is told its session"
    return sandbox.current_session


def status(sandbox: Sandbox) -> SandboxStatus | None:
    session = sandbox.current_session
    return sandbox.status if session is None or session.status is None else session.status


def seconds_left(sandbox: Sandbox) -> float:
    """Of its machine's life, as far as our clock agrees with Vercel's."""
    session = session_of(sandbox)
    limit = session.execution_time_limit or timedelta(0)
    left = (session.started_at or 0) / 1000 + limit.total_seconds() - time.time()
    return min(max(left, 0.0), limit.total_seconds())


async def _settled(client: SandboxClient, sandbox: Sandbox) -> Sandbox:
    """Not on its way from one state to another. Whoever calls has a deadline."""
    from vercel.sandbox import SandboxStatus

    passing = (SandboxStatus.PENDING, SandboxStatus.STOPPING, SandboxStatus.SNAPSHOTTING)
    while status(sandbox) in passing:
        await asyncio.sleep(_POLL_SECONDS)
        sandbox = await client.get_sandbox(name=sandbox.name)
    return sandbox


async def _up(client: SandboxClient, sandbox: Sandbox) -> Sandbox:
    from vercel.sandbox import SandboxStatus, SandboxTerminalStateError

    sandbox = await _settled(client, sandbox)
    now = status(sandbox)
    if now is None or now is not SandboxStatus.RUNNING:
        raise SandboxTerminalStateError(
            f"the sandbox {sandbox.name} is {now}", status=now or SandboxStatus.FAILED, sandbox=sandbox
        )
    return sandbox


async def _last_saved(client: SandboxClient, sandbox: Sandbox) -> Snapshot | None:
    """The snapshot that ended the last session, if one did: an older one lacks what happened since."""
    if sandbox.current_snapshot_id is None:
        return None
    snapshot = await snapshot_of(client, sandbox.current_snapshot_id)
    return snapshot if snapshot and snapshot.source_session_id == sandbox.current_session_id else None
