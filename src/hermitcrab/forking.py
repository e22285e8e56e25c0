"""Independent copies of an environment, files and state: for best-of-n, and for searching a tree of attempts.

By a snapshot where the backend has them; else the workspace is copied, or carried.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

from hermitcrab import snapshots
from hermitcrab.async_environment import AsyncEnvironment
from hermitcrab.config import Resolved
from hermitcrab.errors import ConfigError, HermitcrabWarning, SandboxError, TransferError
from hermitcrab.moving import Plan, carried, carry, end, fresh_directory, settle, source_directory
from hermitcrab.opening import opened
from hermitcrab.store import Leftover, Store

_SHARED = ("task_id", "persistent_filesystem", "auto_mount_cwd", "workspace")
"""Settings that give a sandbox files or a container which another one has as well."""


async def fork(env: AsyncEnvironment, n: int, directory: str = "") -> list[AsyncEnvironment]:
    """So many independent copies, started at once."""
    if n < 1:
        raise ConfigError(f"fork: got {n!r}, takes 1 or more")
    return await fork_into(env, [alone(env._resolved)] * n, directory)


async def fork_into(
    env: AsyncEnvironment, settings: Sequence[Resolved], directory: str = "", *, lasting: bool = False
) -> list[AsyncEnvironment]:
    """A copy for each of these settings, all of them or none. `lasting`: their files outlive the program."""
    settings = [each.going_on() for each in settings]
    if env._resolved.backend.snapshots is None:
        source = await source_directory(env, directory)
        if env.traits.persistent:  # a host: the copies are on the same one
            return await _all(_copied(env, source, each, lasting) for each in settings)
        return await _all(carried(env, source, each, Plan()) for each in settings)
    return await _by_snapshot(env, settings)


async def _by_snapshot(env: AsyncEnvironment, settings: Sequence[Resolved]) -> list[AsyncEnvironment]:
    id, store = await env.snapshot("for forks"), Store()
    # Should this program be killed, the snapshot is nobody's.
    left = Leftover(snapshots.SNAPSHOT, id)
    await asyncio.to_thread(store.note, left)
    try:
        forks = await _all(_restored(env, id, each) for each in settings)
    finally:
        # An engine does not let go of what a copy runs from; then it goes after the last of them.
        whole = await asyncio.to_thread(snapshots.forget_snapshot, id)
        await asyncio.to_thread(store.removed, left)
    if not whole:
        await end(forks)
        raise SandboxError("fork: the snapshot that the copies begin with was damaged", backend=env.backend)
    for each in forks:
        each._afterwards.append(partial(asyncio.to_thread, snapshots.remove_leftovers, id))
    return forks


def alone(resolved: Resolved) -> Resolved:
    """The settings of a sandbox that shares with no other what these say is its own."""
    shared = {each.name: each.default for each in fields(resolved.options) if each.name in _SHARED}
    return replace(resolved, options=replace(resolved.options, **shared))


async def _all(starting: Iterable[Coroutine[Any, Any, AsyncEnvironment]]) -> list[AsyncEnvironment]:
    """All of them, or an error and none."""
    tasks = [asyncio.create_task(each) for each in starting]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await end(_begun(tasks))
        raise
    begun = _begun(tasks)
    if len(begun) < len(tasks):
        await end(begun)
        error = next(filter(None, (task.exception() for task in tasks)))
        if isinstance(error, SandboxError):
            error.args = (f"{len(tasks) - len(begun)} of {len(tasks)} copies did not start: {error}",)
        raise error
    return begun


def _begun(tasks: Iterable[asyncio.Task[AsyncEnvironment]]) -> list[AsyncEnvironment]:
    return [task.result() for task in tasks if not task.cancelled() and task.exception() is None]


async def _restored(env: AsyncEnvironment, id: str, resolved: Resolved) -> AsyncEnvironment:
    """One from the snapshot, and with what that leaves out because it is the host's: a mounted workspace."""
    new = await opened(resolved, snapshot=id)
    try:
        new.workspace = env.workspace
        shares = env._resolved.options != resolved.options
        if env.workspace and shares and not await new.files.list(env.workspace):
            await carry(env, env.workspace, new, env.workspace, Plan())
            await settle(new, env.state, env.workspace, env.workspace)
    except BaseException:
        await end([new])
        raise
    return new


async def _copied(env: AsyncEnvironment, source: str, resolved: Resolved, lasting: bool) -> AsyncEnvironment:
    """One on the same machine, with a copy of the directory that goes when it goes."""
    state = env.state
    new = await opened(resolved, state)
    try:
        path = fresh_directory(new.state.environ, "forks")
        await _noted(new, path)
        new._farewells.append(partial(_removed, new, path))
        await new.files.mkdir(path, mode=0o700)
        copying = await new._session.sandbox.spawn(["cp", "-a", "--", f"{source}/.", path])
        said = await copying.said()
        if (await copying.wait()).code:
            raise TransferError(f"cannot copy {source}: {said.decode(errors='replace').strip()}")
        await settle(new, state, source, path)
    except BaseException:
        await end([new])
        raise
    if lasting:
        new._farewells.clear()
        while new._afterwards:
            await new._afterwards.pop()()
    return new


async def _removed(new: AsyncEnvironment, path: str) -> None:
    try:
        await new.files.remove(path, recursive=True, missing_ok=True)
    except SandboxError as error:
        warnings.warn(f"the fork's files are still in {path}: {error}", HermitcrabWarning, stacklevel=2)


async def _noted(new: AsyncEnvironment, path: str) -> None:
    """On this machine a directory that a killed program leaves is removed by the next one."""
    if new.traits.carries == "same files":
        store, left = Store(), Leftover(snapshots.DIRECTORY, path)
        await asyncio.to_thread(store.note, left)
        new._afterwards.append(partial(asyncio.to_thread, store.removed, left))
