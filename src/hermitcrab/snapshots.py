"""Snapshots: a sandbox's files and its session's state, kept under an id that opens another one like it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermitcrab import trees
from hermitcrab.backends import registry
from hermitcrab.backends.data import remove_tree, task_directory
from hermitcrab.core.protocols import Backend, Listed, Snapshots
from hermitcrab.errors import (
    HermitcrabWarning,
    SandboxError,
    StoreError,
    UnsupportedCapability,
)
from hermitcrab.files import roots
from hermitcrab.records import TASK
from hermitcrab.store import Leftover, Snapshot, Store

if TYPE_CHECKING:
    from hermitcrab.config import Resolved
    from hermitcrab.core.session import Session

ARCHIVE, DIRECTORY, SNAPSHOT = "archive", "directory", "snapshot"
_KINDS = {DIRECTORY: "a fork's files", TASK: "what is left of a session"}
_SURELY_OVER = 3600.0
"""Seconds after which an engine that was asked by a dead program does not make anything any more."""
_SWEEP_AFTER = 0.3
_NOT_TAKEN_ALONG = frozenset({"cwd", "env", "task_id", "persistent_filesystem"})
"""Settings of an environment that are not those of another one like it."""


def required(backend: Backend[Any]) -> Snapshots:
    """How this kind is kept; UnsupportedCapability before anything runs."""
    if backend.snapshots is None:
        raise UnsupportedCapability(
            f"{backend.name} has no snapshots: this place is not ours to copy", backend=backend.name
        )
    return backend.snapshots


async def take(resolved: Resolved, session: Session, label: str = "") -> str:
    """Keep the files and the state as they are now, and return the id."""
    required(resolved.backend)
    store = Store()
    snapshot = await taken(store, resolved, session, label, store.add_snapshot)
    with suppress(SandboxError):  # the next command says so
        # Where the sandbox was stopped for it, it goes on before anybody can remove what it goes on from.
        await session.ready()
    return snapshot.id


def list_snapshots() -> list[Snapshot]:
    """All of them, the oldest first. Waits for the disk, as the two below."""
    return Store().snapshots()


def forget_snapshot(id: str, store: Store | None = None) -> bool:
    """Remove a snapshot and all that belongs to it. Whether there was one."""
    store = store or Store()
    known = store.snapshot(id) is not None
    remove_noted(store, store.forget_snapshot(id))
    return known


def remove_leftovers(id: str, store: Store | None = None) -> None:
    """Try again what `forget_snapshot` could not remove because it was in use."""
    store = store or Store()
    remove_noted(store, [each for each in store.leftovers() if id in each.what])


def remove_noted(store: Store, leftovers: Iterable[Leftover]) -> None:
    """What is in use, or of an engine that does not answer, stays a leftover."""
    for left in leftovers:
        with suppress(SandboxError):
            _remove(store, left)
            store.removed(left)


def reap(store: Store | None = None) -> list[tuple[str, Listed]]:
    """Remove what killed programs left: a backend's name, or the kind of what it is, and what."""
    store, gone = store or Store(), []
    for left in [each for each in store.leftovers() if each.orphaned] if store.exists() else []:
        with suppress(SandboxError):  # what must stay for now, and notes that name nothing
            found = _remove(store, left)
            if found or left.age > _SURELY_OVER:
                store.removed(left)
            if found:
                detail = _KINDS.get(left.kind, "a snapshot")
                gone.append((left.kind, Listed(left.what, detail, orphaned=True, age=left.age)))
    return gone


async def taken(
    store: Store,
    resolved: Resolved,
    session: Session,
    label: str,
    record: Callable[..., object],
    *,
    automatic: bool = False,
) -> Snapshot:
    """Make everything, then record it; after any failure nothing of it is left."""
    capability, id = required(resolved.backend), f"{time.strftime('%y%m%d')}-{secrets.token_hex(5)}"
    made = [Leftover(ARCHIVE, id)]
    if reference := capability.reference(id):
        made.append(Leftover(resolved.backend.name, reference))
    sweep_later(store)
    try:
        for each in made:
            await asyncio.to_thread(store.note, each)
        snapshot = await _made(store, resolved, session, id, automatic=automatic)
        snapshot = replace(snapshot, label=label)
        await asyncio.to_thread(record, snapshot, *made)
    except BaseException as error:
        await asyncio.to_thread(remove_noted, store, made)
        if isinstance(error, OSError):
            raise StoreError(f"{store.archives / id}: {error.strerror}; it was not kept") from error
        raise
    return snapshot


async def _made(store: Store, resolved: Resolved, session: Session, id: str, *, automatic: bool) -> Snapshot:
    capability, config = required(resolved.backend), resolved.options
    sandbox, state = await session.ready(), session.lasting_state
    carried = carried_names(resolved)
    whole = [
        tree._replace(exclude=(*tree.exclude, *carried)) if tree.home else tree
        for tree in await capability.trees(sandbox, config)
        if not (automatic and tree.kept)
    ]
    layer = None if automatic else await capability.layer(sandbox, config)
    parts = await trees.packed(sandbox, whole, layer, store.archives / id)
    stays = automatic and is_lasting(resolved)
    return Snapshot(
        id=id,
        backend=resolved.backend.name,
        place=state.place,
        task=capability.task(config),
        native="" if stays else await capability.save(sandbox, config, id),
        archive=id,
        parts=json.dumps([part._asdict() for part in parts]),
        state=state.to_json(),
        options=_options(resolved),
        size=sum(part.size for part in parts),
    )


def is_lasting(resolved: Resolved) -> bool:
    """Whether the sandbox itself is what is kept of its task."""
    lasting = resolved.backend.lasting
    return lasting is not None and lasting(resolved.options)


def carried_names(resolved: Resolved) -> list[str]:
    """What credentials, skills and caches are called in a home."""
    config = resolved.session
    return [*config.credentials, *([".hermitcrab"] if config.skills or config.caches else [])]


def _options(resolved: Resolved) -> dict[str, Any]:
    """The settings that somebody gave and that are no secrets, as JSON has them."""
    found = {}
    for config in (resolved.session, resolved.options):
        for each in fields(config):
            if (
                each.name in resolved.sources
                and each.name not in _NOT_TAKEN_ALONG
                and not each.metadata.get("secret")
            ):
                found[each.name] = roots.plain(getattr(config, each.name))
    return found


def _remove(store: Store, left: Leftover) -> bool:
    """Whether there was anything. SandboxError when it has to stay for now."""
    if left.kind == ARCHIVE:
        directory = store.archives / Path(left.what).name
        there = directory.exists()
        shutil.rmtree(directory, ignore_errors=True)
        return there
    if left.kind == SNAPSHOT:
        return forget_snapshot(left.what, store)
    if left.kind == DIRECTORY:
        there = Path(left.what).exists()
        remove_tree(Path(left.what))
        return there
    if left.kind == TASK:
        for each in store.leftovers():
            if each.what.startswith(f"{left.what}/"):  # that it was being opened
                store.removed(each)
        return _task_removed(*left.what.split("/", 1))
    capability = registry.get(left.kind).snapshots
    return capability is not None and capability.remove(left.what)


def _task_removed(backend: str, task: str) -> bool:
    """Its sandbox, if one runs, and its files."""
    end = registry.get(backend).end_task
    ran = end is not None and end(task)
    files = task_directory(backend, task, os.environ)
    there = files.exists()
    remove_tree(files)
    return ran or there


_swept: set[Path] = set()


def sweep_later(store: Store) -> None:
    """Once in a program's life, on a thread that nobody has to wait for."""
    if store.directory not in _swept:
        _swept.add(store.directory)
        sweep = threading.Thread(target=_sweep, args=(store,), name="hermitcrab-reap", daemon=True)
        asyncio.get_running_loop().call_later(_SWEEP_AFTER, sweep.start)


def _sweep(store: Store) -> None:
    with suppress(SandboxError):
        reap(store)


def warn(message: str) -> None:
    warnings.warn(message, HermitcrabWarning, stacklevel=2)
