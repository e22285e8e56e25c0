"""Environments that begin with a snapshot, and tasks that go on from their latest one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hermitcrab import trees
from hermitcrab.backends import registry
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import Backend, Snapshots, Tree
from hermitcrab.core.state import ShellState
from hermitcrab.errors import ConfigError, SandboxError, SandboxStartError, StoreError
from hermitcrab.snapshots import (
    SNAPSHOT,
    carried_names,
    forget_snapshot,
    is_lasting,
    remove_leftovers,
    remove_noted,
    required,
    sweep_later,
    taken,
    warn,
)
from hermitcrab.store import Leftover, Slot, Snapshot, Store
from hermitcrab.trees import Broken, Part

if TYPE_CHECKING:
    from hermitcrab.async_environment import AsyncEnvironment
    from hermitcrab.config import Resolved
    from hermitcrab.core.session import Session

Prepare = Callable[[AgentSandbox], Awaitable[None]]
Begin = Callable[["Resolved", ShellState | None, Prepare | None], Awaitable["AsyncEnvironment"]]
"""Starts a sandbox, prepares it and opens a session in that state."""

_OPENING = "opening"
"""The kind of a note in the store, as long as a task is being opened."""
_OPENING_PATIENCE = 120.0
"""Seconds that another program may take to open the same task: it may have to pull an image."""


async def as_it_was(id: str, on: str | None, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Where to open a snapshot, and with which settings: those it was made with, unless others are given."""
    snapshot = await asyncio.to_thread(Store().snapshot, id)
    if snapshot is None:
        if on is None:
            raise ConfigError(
                f"snapshot: there is none with the id {id!r}; `hermitcrab snapshot ls` lists them"
            )
        return on, options
    if on is None or registry.canonical(on) == snapshot.backend:
        return snapshot.backend, {**snapshot.options, **options}
    return on, options


async def opened(resolved: Resolved, place: str, wanted: str, begin: Begin) -> AsyncEnvironment:
    """An environment from the wanted snapshot, or from the latest one of its task."""
    capability = required(resolved.backend)
    store, task = Store(), capability.task(resolved.options)
    sweep_later(store)
    if not task:
        return await _begun(store, resolved, place, wanted, None, begin)
    slot = Slot(resolved.backend.name, task, place)
    if wanted:
        await asyncio.to_thread(_refuse_running, resolved.backend, task)
    try:
        async with _alone(store, slot):
            read = await asyncio.to_thread(store.latest, slot)
            async with _undisturbed(store, slot, begin) as begin:
                latest = None if wanted else slot
                environment = await _begun(store, resolved, place, wanted or read, latest, begin)
    except StoreError as error:
        if wanted:
            raise
        warn(f"task {task!r} begins anew, and is not kept: {error}")
        return await begin(resolved, None, None)
    environment._keeper = Keeper(resolved, store, read)
    return environment


class Keeper:
    """Keeps a task for the next program that opens it."""

    def __init__(self, resolved: Resolved, store: Store, read: str) -> None:
        self._resolved = resolved
        self._store = store
        self._read = read
        """The snapshot that was the latest when this environment was opened."""
        self._replaced = ""

    async def keep(self, session: Session) -> None:
        """Take a snapshot in place of the one that was read. A failure is a warning, and changes nothing."""
        replaced: str | None = None

        def record(snapshot: Snapshot, *made: Leftover) -> None:
            nonlocal replaced
            replaced = self._store.renew(snapshot, *made, read=self._read)

        try:
            snapshot = await taken(self._store, self._resolved, session, "", record, automatic=True)
        except SandboxError as error:
            warn(f"the task was not kept, its last snapshot stays: {error}")
            return
        if replaced is None:
            warn(f"another program kept this task meanwhile; what it is here is snapshot {snapshot.id}")
        else:
            self._replaced = replaced

    async def after_the_end(self) -> None:
        """Remove what was replaced; the sandbox may have run from it until now."""
        replaced, self._replaced = self._replaced, ""
        if replaced:
            await asyncio.to_thread(remove_noted, self._store, [Leftover(SNAPSHOT, replaced)])


class _Kept(NamedTuple):
    """A snapshot, looked through and found good."""

    snapshot: Snapshot
    state: ShellState
    parts: Sequence[Part]
    directory: Path


async def _begun(
    store: Store, resolved: Resolved, place: str, id: str, latest: Slot | None, begin: Begin
) -> AsyncEnvironment:
    """From that snapshot, if there is one and it is good; `latest` when nobody asked for it by its id."""
    if not id:
        return await begin(resolved, None, None)
    try:
        kept = await asyncio.to_thread(_intact, store, resolved, place, id)
        environment = await _from(kept, resolved, latest, begin)
        if kept.snapshot.native:
            # Somebody may forget it while the sandbox runs from it.
            environment._afterwards.append(partial(asyncio.to_thread, remove_leftovers, id, store))
        return environment
    except Broken as broken:
        await asyncio.to_thread(forget_snapshot, id, store)
        warn(f"snapshot {id}: {broken}. It is forgotten, and the sandbox begins anew")
    except _NotRestored as failure:
        if latest is None:
            raise failure.reason from None
        with suppress(StoreError):
            await asyncio.to_thread(store.let_go, latest, id)
        warn(f"the task begins anew; snapshot {id} stays, but cannot be restored: {failure.reason}")
    return await begin(resolved, None, None)


class _NotRestored(Exception):
    """A sandbox started, and would not take what was kept."""

    def __init__(self, reason: SandboxError) -> None:
        self.reason = reason


async def _from(kept: _Kept, resolved: Resolved, latest: Slot | None, begin: Begin) -> AsyncEnvironment:
    async def restore(sandbox: AgentSandbox) -> None:
        try:
            await _restore(resolved, kept, sandbox)
        except (ConfigError, StoreError):
            raise
        except SandboxError as error:
            raise _NotRestored(error) from error

    applied = _applied(resolved, required(resolved.backend), kept.snapshot, goes_on=latest is not None)
    try:
        environment = await begin(applied, kept.state, restore)
    except SandboxStartError as error:
        if kept.snapshot.native:
            id = kept.snapshot.id
            error.args = (f"{error} (from snapshot {id}; without it: `hermitcrab snapshot rm {id}`)",)
        raise
    environment._resolved = resolved
    return environment


def _intact(store: Store, resolved: Resolved, place: str, id: str) -> _Kept:
    snapshot = store.snapshot(id)
    if snapshot is None:
        raise Broken("there is none with that id")
    _refuse_other_place(snapshot, resolved, place)
    try:
        parts = [Part.parse(each) for each in json.loads(snapshot.parts)]
        state = ShellState.from_json(snapshot.state)
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise Broken(f"its record is damaged: {error}") from None
    directory = store.archives / snapshot.archive
    trees.check(parts, directory)
    if snapshot.native and not required(resolved.backend).available(snapshot.native):
        raise Broken(f"{snapshot.native} is gone")
    return _Kept(snapshot, state, parts, directory)


def _refuse_other_place(snapshot: Snapshot, resolved: Resolved, place: str) -> None:
    other = snapshot.backend != resolved.backend.name
    if other or (snapshot.native and snapshot.place != place):
        raise ConfigError(
            f"snapshot: {snapshot.id} is of {snapshot.place}, not of {place}; "
            "open it there, and then use move_to"
        )


def _refuse_running(backend: Backend[Any], task: str) -> None:
    """Before we join it, which would take it away from whoever has it."""
    if any(each.task == task for each in (backend.sandboxes() if backend.sandboxes else [])):
        raise ConfigError(
            f"snapshot: a sandbox of task {task!r} still runs; clean it up first, or choose another task_id"
        )


def _applied(resolved: Resolved, capability: Snapshots, snapshot: Snapshot, *, goes_on: bool) -> Resolved:
    """The same environment with what is the engine's own; a task goes on where it was, not where it began."""
    options = resolved.options
    return replace(
        resolved,
        options=capability.applied(options, snapshot.native) if snapshot.native else options,
        session=replace(resolved.session, cwd="") if goes_on else resolved.session,
    )


async def _restore(resolved: Resolved, kept: _Kept, sandbox: AgentSandbox) -> None:
    """Put the archived trees in their places, in a sandbox where nothing runs yet."""
    if sandbox.joined:
        return  # it is the task as it is now
    if is_lasting(resolved) and not kept.snapshot.native:
        warn(f"the sandbox of task {kept.snapshot.task!r} is gone; the session goes on without its files")
    found = await required(resolved.backend).trees(sandbox, resolved.options)
    places, carried = {tree.path: tree for tree in found}, carried_names(resolved)
    for part in kept.parts:
        if part.layer or await _welcome(sandbox, part, places.get(part.path), carried):
            await trees.unpack(sandbox, part, kept.directory)


async def _welcome(sandbox: AgentSandbox, part: Part, tree: Tree | None, carried: Sequence[str]) -> bool:
    """Whether a tree has a place here. It must not overwrite what belongs to the host, or to the task."""
    if tree is None:
        warn(f"{part.path} is the host's here; what the snapshot has of it was left out")
        return False
    # What is carried cannot be written to anyway.
    if hidden := [
        name
        for name in tree.exclude
        if name not in part.exclude and not any(f"/{name}/".endswith(f"/{each}/") for each in carried)
    ]:
        raise ConfigError(
            f"snapshot: it has a {part.path}, and in there the host's {min(hidden)!r} is mounted"
        )
    if tree.kept and not await trees.is_empty(sandbox, part.path):
        raise ConfigError(
            f"snapshot: the task already has files in {part.path}; choose another task_id, or none"
        )
    return True


@asynccontextmanager
async def _alone(store: Store, slot: Slot) -> AsyncIterator[None]:
    """One program at a time opens a task, so that nobody finds it half restored."""
    with ExitStack() as stack:
        lock = store.lock(f"opening {'/'.join(slot)}", _OPENING_PATIENCE)
        await asyncio.to_thread(stack.enter_context, lock)
        yield


class _Remains(Exception):
    """What is there is half of a task."""


@asynccontextmanager
async def _undisturbed(store: Store, slot: Slot, begin: Begin) -> AsyncIterator[Begin]:
    """A way to begin that does not take over what a program left that was killed while it did the same."""
    note = Leftover(_OPENING, "/".join(slot))
    noted = await asyncio.to_thread(store.leftovers)
    await asyncio.to_thread(store.note, note)
    try:
        yield partial(_anew, begin) if any(note[:2] == each[:2] for each in noted) else begin
    finally:
        await asyncio.to_thread(store.removed, note)


async def _anew(
    begin: Begin, resolved: Resolved, state: ShellState | None, prepare: Prepare | None
) -> AsyncEnvironment:
    async def checked(sandbox: AgentSandbox) -> None:
        if sandbox.joined:
            sandbox.joined = False  # so that it is removed
            raise _Remains
        if prepare is not None:
            await prepare(sandbox)

    try:
        return await begin(resolved, state, checked)
    except _Remains:
        return await begin(resolved, state, prepare)
