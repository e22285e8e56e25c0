"""From settings to an environment: the one place where all parts of one are put together."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Awaitable, Generator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hermitcrab.async_environment import AsyncEnvironment
from hermitcrab.config import Resolved, resolve
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import Luggage
from hermitcrab.core.session import Session
from hermitcrab.core.state import ShellState
from hermitcrab.files.access import AsyncFiles
from hermitcrab.policy.carriage import Carriage
from hermitcrab.policy.environment import Forwarding, inherited
from hermitcrab.policy.guard import Confirm, guard_for

if TYPE_CHECKING:
    from hermitcrab.files.sync import AsyncFileSync
    from hermitcrab.policy.sudo import Sudo
    from hermitcrab.reopening import Prepare


class aopen:
    """`env = await aopen(...)`, or `async with aopen(...) as env`. Arguments as for `open`."""

    def __init__(
        self,
        on: str | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        confirm: Confirm | None = None,
        **options: Any,
    ) -> None:
        self._arguments = (on, state, keep_code, snapshot, confirm, options)
        self._environment: AsyncEnvironment | None = None

    def __await__(self) -> Generator[Any, None, AsyncEnvironment]:
        return open_environment(*self._arguments).__await__()

    async def __aenter__(self) -> AsyncEnvironment:
        self._environment = await self
        return self._environment

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._environment is not None:
            await self._environment.cleanup()


async def open_environment(
    on: str | None,
    state: ShellState | None,
    keep_code: bool,
    snapshot: str,
    confirm: Confirm | None,
    options: Mapping[str, Any],
) -> AsyncEnvironment:
    if snapshot:
        from hermitcrab import reopening

        on, options = await reopening.as_it_was(snapshot, on, options)
    resolved = replace(resolve(on, options, cwd=Path.cwd(), environ=os.environ), confirm=confirm)
    return await opened(resolved, state, keep_code=keep_code, snapshot=snapshot)


async def opened(
    resolved: Resolved, state: ShellState | None = None, *, keep_code: bool = False, snapshot: str = ""
) -> AsyncEnvironment:
    """An environment with exactly these settings."""
    kept = resolved.backend.snapshots
    if not snapshot and (kept is None or not kept.task(resolved.options)):
        return await _begun(resolved, state, keep_code)
    from hermitcrab import reopening  # slow to import, as above

    def begin(
        settings: Resolved, then: ShellState | None, prepare: Prepare | None
    ) -> Awaitable[AsyncEnvironment]:
        return _begun(settings, state or then, keep_code, prepare)

    return await reopening.opened(resolved, _place(resolved), snapshot, begin)


async def _begun(
    resolved: Resolved, state: ShellState | None, keep_code: bool, prepare: Prepare | None = None
) -> AsyncEnvironment:
    """A session on a new sandbox; `prepare` is given that first, and may fill it."""
    forwarding = Forwarding(resolved.session)
    sudo = sudo_for(resolved)
    carriage = Carriage.of(resolved)
    luggage = Luggage(
        mounts=carriage.mounts,
        inherited=partial(inherited, resolved.session, environ=os.environ),
        cwd=resolved.session.cwd,
    )
    start = partial(resolved.backend.start, resolved.options, luggage)
    sandbox: AgentSandbox = await start()
    try:
        if prepare is not None:
            await prepare(sandbox)
        session = Session(
            sandbox,
            resolved.session,
            place=_place(resolved),
            trusted=not resolved.backend.traits.isolated,
            creates_cwd=resolved.backend.traits.creates_cwd,
            inject=forwarding.values if sudo is None else partial(sudo.beside, forwarding.values),
            injected_names=forwarding.names if sudo is None else forwarding.names | sudo.names,
            guard=guard_for(resolved),
            sudo=sudo,
            restart=start if resolved.backend.traits.revives else None,
        )
        goes_on = state is not None or prepare is not None or sandbox.joined
        sync = synced(resolved, session, carriage, careful=goes_on)
        await session.open(state, keep_code=keep_code, arrived=sync.before_command if sync else None)
        await carriage.arrive(session, AsyncFiles(session))
    except BaseException:
        # What was there before us may be needed after us.
        await (sandbox.detach() if sandbox.joined else sandbox.release())
        raise
    environment = AsyncEnvironment(resolved, session, carriage)
    environment._farewells.append(carriage.leave)
    if sudo is not None:
        environment._farewells.append(sudo.leave)  # before anything is kept of the sandbox
    if sync is not None:
        environment._keep_in_step(sync)
    if carriage.copies is not None:
        carriage.copies.go_along()
    return environment


def sudo_for(resolved: Resolved) -> Sudo | None:
    if resolved.session.sudo_password is None:
        return None
    from hermitcrab.policy.sudo import Sudo

    return Sudo(resolved.session.sudo_password)


def synced(
    resolved: Resolved, session: Session, carriage: Carriage, *, careful: bool
) -> AsyncFileSync | None:
    """`careful` where the sandbox may hold work of an earlier session, which must not be overwritten."""
    config = resolved.session
    if not config.sync:
        return None
    from hermitcrab.files.sync import AsyncFileSync  # most sessions need none

    return AsyncFileSync(
        AsyncFiles(session),
        [replace(root, exclude=(*root.exclude, *config.sync_exclude)) for root in config.sync],
        most_bytes=config.sync_back_bytes,
        most_seconds=config.sync_back_seconds,
        careful=careful,
        memory=_sync_memory(resolved, session),
        secrets={item.path: item.source for item in carriage.items if item.kind == "credential"},
    )


def _sync_memory(resolved: Resolved, session: Session) -> Path | None:
    """Where it is kept what both sides agreed on, of a sandbox that outlives this program."""
    if not (resolved.backend.traits.persistent or session.sandbox.detached):
        return None
    from hermitcrab.store import state_directory

    key = f"{_place(resolved)}\0{session.sandbox.name}"
    return state_directory() / "sync" / hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()[:32]


def _place(resolved: Resolved) -> str:
    """What tells one place from another: whose PATH and HOME these are."""
    backend = resolved.backend
    target = getattr(resolved.options, backend.target, None) if backend.target else None
    return f"{backend.name}:{target or platform.node()}"
