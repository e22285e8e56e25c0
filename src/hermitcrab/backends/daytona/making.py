"""How a sandbox at Daytona comes up: made, or started again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hermitcrab.backends.daytona.config import DaytonaConfig, RestoredConfig, gibibytes, whole
from hermitcrab.backends.daytona.machine import in_minutes

if TYPE_CHECKING:
    from hermitcrab.backends.daytona.sdk import (
        AsyncDaytona,
        AsyncSandbox,
        CreateSandboxFromImageParams,
        CreateSandboxFromSnapshotParams,
    )

BROKEN = frozenset({"error", "build_failed"})
_AT_REST = frozenset({"stopped", "archived", "archiving", "paused", "pausing"})
_LOOK_AGAIN = 1.0


def wanted(
    config: DaytonaConfig, name: str, life: int, labels: Mapping[str, str]
) -> CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams:
    """What is to be kept is not lost when nobody extends its life: it is stopped, and found again."""
    from hermitcrab.backends.daytona.sdk import (
        CreateSandboxFromImageParams,
        CreateSandboxFromSnapshotParams,
        Resources,
    )

    minutes = in_minutes(life)
    common: dict[str, Any] = {
        "name": name,
        "labels": dict(labels),
        "os_user": config.user or None,
        "network_block_all": not config.network,
        "auto_stop_interval": minutes if config.persistent_filesystem else 0,
        "ttl_minutes": None if config.persistent_filesystem else minutes,
    }
    snapshot = (config.snapshot if isinstance(config, RestoredConfig) else "") or config.template
    if snapshot or not config.image:
        return CreateSandboxFromSnapshotParams(snapshot=snapshot or None, **common)
    resources = Resources(cpu=whole(config.cpu), memory=gibibytes(config.memory), disk=gibibytes(config.disk))
    return CreateSandboxFromImageParams(image=config.image, resources=resources, **common)


async def made(
    client: AsyncDaytona, wanted: CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams
) -> AsyncSandbox:
    """A sandbox that is running. Its name is this creation's alone."""
    from hermitcrab.backends.daytona.sdk import DaytonaConflictError, DaytonaNotFoundError

    try:
        return await client.create(wanted, timeout=0)
    except DaytonaConflictError as conflict:
        # An earlier attempt was heard, and its answer was lost.
        try:
            sandbox = await client.get(wanted.name or "")
        except DaytonaNotFoundError:
            raise conflict from None
        await sandbox.wait_for_sandbox_start(timeout=0)
        return sandbox


async def started(sandbox: AsyncSandbox) -> None:
    """Wait until it runs; whether it should is not asked any more."""
    from hermitcrab.backends.daytona.sdk import DaytonaError

    if state(sandbox) == "stopping":
        await sandbox.wait_for_sandbox_stop(timeout=0)
    now = state(sandbox)
    if now in BROKEN:
        if not sandbox.recoverable:
            raise DaytonaError(broken(sandbox))
        await sandbox.recover(timeout=0)
    elif now in _AT_REST:
        await sandbox.start(timeout=0)
    else:
        await sandbox.wait_for_sandbox_start(timeout=0)


async def awake(client: AsyncDaytona, name: str) -> None:
    """Wait until a snapshot can be used. Daytona puts those to sleep that nobody used for long."""
    from hermitcrab.backends.daytona.sdk import DaytonaError

    snapshot = await client.snapshot.get(name)
    if snapshot.state.value == "inactive":
        snapshot = await client.snapshot.activate(snapshot)
    while snapshot.state.value not in {"active", *BROKEN}:
        await asyncio.sleep(_LOOK_AGAIN)  # the SDK has no event for it, and does the same
        snapshot = await client.snapshot.get(name)
    if snapshot.state.value in BROKEN:
        reason = f"its state is {snapshot.state.value}: {snapshot.error_reason}"
        raise DaytonaError(f"the snapshot {name} cannot be used: {reason}")


def state(sandbox: AsyncSandbox) -> str:
    return sandbox.state.value if sandbox.state is not None else "unknown"


def broken(sandbox: AsyncSandbox) -> str:
    reason = f": {sandbox.error_reason}" if sandbox.error_reason else ""
    return f"the sandbox {sandbox.id} is in the state {state(sandbox)} at Daytona{reason}"
