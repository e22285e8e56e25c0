"""Named sessions: a session that goes on in the next program, under a name that people gave it.

Its settings and the state of its shell are in the store; its files, where the backend keeps them, are those
of a task of its own. One program at a time uses it, and the next one waits.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hermitcrab.async_environment import AsyncEnvironment
from hermitcrab.backends import registry
from hermitcrab.backends.data import remove_tree, task_directory
from hermitcrab.config import Resolved, resolve, settings_for
from hermitcrab.core import loop
from hermitcrab.core.state import ShellState
from hermitcrab.environment import Environment, around
from hermitcrab.errors import ConfigError, HermitcrabWarning, SandboxError
from hermitcrab.files import roots
from hermitcrab.opening import opened
from hermitcrab.records import TASK
from hermitcrab.store import Leftover, SavedSession, Slot, Store

if TYPE_CHECKING:
    from hermitcrab.moving import Plan

Waiting = Callable[[str], object]
"""Called with a name when another program has that session, before we wait for it."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,39}", re.ASCII)
_TAKEN = ("ls", "rm")
"""What `hermitcrab snapshot` takes for its own words."""
_FORKS = "/hermitcrab/forks/"
_LAST_BREATH = 0.05
_LIFETIME = 7 * 86400.0
"""Seconds that a container, which nobody brings back, goes on between two commands, unless the settings say
otherwise."""


def every() -> list[SavedSession]:
    """All named sessions, by name."""
    return Store().sessions()


def find(name: str) -> SavedSession:
    """The session of that name, or an error that helps."""
    found = Store().session(checked(name))
    if found is None:
        known = [each.name for each in every()]
        guess = registry.did_you_mean(name, known)
        raise ConfigError(f"no session is named {name!r}{guess}; `hermitcrab new {name}` makes one")
    return found


def checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name in _TAKEN:
        raise ConfigError(
            f"{name!r} is no name for a session: letters, digits, dots, dashes and _, 40 at most, "
            "a letter or digit first, and neither `ls` nor `rm`"
        )
    return name


def new(name: str, on: str | None = None, **options: Any) -> SavedSession:
    """Make a session; `on` and the options are those of `hermitcrab.open`."""
    return create(name, resolve(on, options, cwd=Path.cwd(), environ=os.environ))


def create(name: str, settings: Resolved, snapshot: str = "", waiting: Waiting | None = None) -> SavedSession:
    """The same with settings that are known. It is started once; after a failure there is none."""
    store, wanted = Store(), _own(settings, checked(name))
    with _alone(store, name, waiting):
        if store.session(name):
            raise ConfigError(f"there is a session named {name!r}; `hermitcrab rm {name}` removes it")
        with _nothing_unless_begun(store, wanted) as made:
            environment = loop.run(opened(wanted, snapshot=snapshot))
        saved = _saved(name, wanted, environment)
        store.save_sessions(saved, made=made)
        loop.run(_leave(environment))
    return saved


@contextmanager
def use(name: str, waiting: Waiting | None = None) -> Iterator[Environment]:
    """The session, for the length of the block. What it is then is what it will be in the next program."""
    with _used(name, waiting) as (store, saved, environment):
        try:
            yield around(environment)
        finally:
            store.save_sessions(_renewed(saved, environment))


def move(name: str, settings: Resolved, plan: Plan, waiting: Waiting | None = None) -> SavedSession:
    """The session on another sandbox; the old one ends when the new one has been proven."""
    from hermitcrab import moving  # slow to import, as below, and `use` has to be quick

    with _used(name, waiting) as (store, saved, old):
        wanted = _own(settings, name)
        with _nothing_unless_begun(store, wanted) as made:
            new = loop.run(moving.move_into(old, wanted, replace(plan, keep_old=True)))
        moved = replace(_saved(name, wanted, new), created=saved.created)
        left = [] if plan.keep_old else _leftovers(saved.on, saved.task)
        store.save_sessions(moved, made=made, left=left)
        loop.run(_leave(new))
        if not plan.keep_old:
            try:
                loop.run(_end(old, saved))
            except SandboxError as error:
                warnings.warn(f"the old sandbox did not end well: {error}", HermitcrabWarning, stacklevel=2)
            else:
                for each in left:
                    store.removed(each)
    return moved


def fork(name: str, names: Sequence[str], directory: str = "", waiting: Waiting | None = None) -> None:
    """Copies of the session, under names of their own. All of them or none."""
    from hermitcrab import forking

    with _used(name, waiting) as (store, _, environment), ExitStack() as stack:
        for each in names:
            if store.session(checked(each)) or names.count(each) > 1:
                raise ConfigError(f"there is a session named {each!r} already; choose other --names")
            stack.enter_context(store.lock(f"session {each}", 0))
        wanted = [_own(environment._resolved, each) for each in names]
        with _nothing_unless_begun(store, *wanted) as made:
            forks = loop.run(forking.fork_into(environment, wanted, directory, lasting=True))
        store.save_sessions(*map(_saved, names, wanted, forks), made=made)
        for fork in forks:
            loop.run(_leave(fork))


def remove(name: str, *, force: bool = False, waiting: Waiting | None = None) -> str:
    """End the session and remove the files that were its own. `force`: forget it, whatever is left.

    Answers with a directory of files that are not ours to remove, or nothing.
    """
    saved = find(name)
    try:
        with _used(name, waiting) as (store, saved, environment):
            loop.run(_end(environment, saved))
            store.remove_session(name)
            return environment.workspace if environment.traits.persistent else ""
    except SandboxError:
        if not force:
            raise
        Store().remove_session(name, _leftovers(saved.on, saved.task))
    return ""


@contextmanager
def _used(name: str, waiting: Waiting | None) -> Iterator[tuple[Store, SavedSession, AsyncEnvironment]]:
    store = Store()
    find(name)
    with _alone(store, name, waiting):
        saved = find(name)  # as it is now that nobody else has it
        environment = loop.run(_reopened(saved))
        try:
            yield store, saved, environment
        finally:
            loop.run(_leave(environment))


def _alone(store: Store, name: str, waiting: Waiting | None) -> AbstractContextManager[None]:
    return store.lock(f"session {name}", float("inf"), partial(waiting, name) if waiting else None)


def _own(resolved: Resolved, name: str) -> Resolved:
    """The settings of a sandbox that is this session's alone and, where that can be, outlives the program."""
    wanted: dict[str, Any] = {
        "task_id": f"{name}-{secrets.token_hex(3)}",
        "persistent_filesystem": True,
    }
    if "max_lifetime" not in resolved.sources and not resolved.backend.traits.revives:
        wanted["max_lifetime"] = _LIFETIME
    known = {each.name for each in fields(resolved.options)}
    options = replace(resolved.options, **{key: value for key, value in wanted.items() if key in known})
    return replace(resolved, options=options)


@contextmanager
def _nothing_unless_begun(store: Store, *settings: Resolved) -> Iterator[list[Leftover]]:
    """What is made in the block is noted first; `save_sessions` makes it the sessions' own."""
    made = [left for each in settings for left in _leftovers(each.backend.name, _task(each))]
    for each in made:
        store.note(each)
    try:
        yield made
    except BaseException:
        from hermitcrab import snapshots

        snapshots.remove_noted(store, made)
        raise


def _leftovers(backend: str, task: str) -> list[Leftover]:
    """What there is of a task that no session has any more."""
    return [Leftover(TASK, f"{backend}/{task}")] if task else []


def _task(resolved: Resolved) -> str:
    return str(getattr(resolved.options, "task_id", ""))


def _saved(name: str, resolved: Resolved, environment: AsyncEnvironment) -> SavedSession:
    options = _plain_settings(resolved)
    if not environment.traits.workspace:
        options["cwd"] = environment.workspace
    return SavedSession(
        name=name,
        on=resolved.backend.name,
        options=options,
        state=environment._session.lasting_state.to_json(),
        task=_task(resolved),
    )


def _renewed(saved: SavedSession, environment: AsyncEnvironment) -> SavedSession:
    return replace(saved, state=environment._session.lasting_state.to_json(), used=time.time())


def _plain_settings(resolved: Resolved) -> dict[str, Any]:
    """All settings in force but secrets, as JSON has them. Where it was made, no file is asked again."""
    return {
        each.name: roots.plain(getattr(config, each.name))
        for config in (resolved.session, resolved.options)
        for each in fields(config)
        if each.init and not each.metadata.get("secret")
    }


def _resolved(saved: SavedSession) -> Resolved:
    """The settings it was made with; those that are secret are asked for anew, since they are not stored."""
    known = settings_for(registry.get(saved.on))
    options = {key: value for key, value in saved.options.items() if key in known}
    return resolve(saved.on, options, cwd=Path.cwd(), environ=os.environ)


async def _reopened(saved: SavedSession) -> AsyncEnvironment:
    resolved = _resolved(saved)
    environment = await opened(resolved.going_on(), ShellState.from_json(saved.state))
    environment.workspace = environment.traits.workspace or resolved.session.cwd
    return environment


async def _leave(environment: AsyncEnvironment) -> None:
    """To the next program, where the sandbox has a life of its own; else it ends, and keeps its files."""
    if environment._session.sandbox.detached and not environment._cleaned and await _is_needed(environment):
        await environment.detach()
    else:
        environment._keeper = None  # the state is in the store, and the files of its task are kept anyway
        await environment.cleanup()


async def _is_needed(environment: AsyncEnvironment) -> bool:
    """Of a host nothing is kept but what runs there; what a command started may be about to end with it."""
    sandbox = environment._session.sandbox
    if not environment.traits.persistent or environment.processes():
        return True
    if sandbox.lingering:
        await asyncio.sleep(_LAST_BREATH)
    return sandbox.lingering


async def _end(environment: AsyncEnvironment, saved: SavedSession) -> None:
    """The sandbox, and all that was its own."""
    environment._keeper = None
    files = task_directory(saved.on, saved.task, os.environ) if saved.task else None
    if files is not None:
        home = environment.state.environ.get("HOME", "")
        for path, kept in ((environment.traits.workspace, "workspace"), (home, "home")):
            await _emptied(environment, path, files / kept)
    if _FORKS in environment.workspace:
        await environment.files.remove(environment.workspace, recursive=True, missing_ok=True)
    place = environment.state.place
    await environment.cleanup()
    if files is not None:
        await asyncio.to_thread(_forget_task, saved, place, files)


async def _emptied(environment: AsyncEnvironment, path: str, kept: Path) -> None:
    """From inside, because on the host they may be another user's. Only if it is ours, and not a volume."""
    with suppress(SandboxError, OSError):
        ours = await asyncio.to_thread(kept.stat)
        if (await environment.files.stat(path)).inode == ours.st_ino:
            names = [each.path for each in await environment.files.list(path)]
            await environment.files.remove_many(path, names)


def _forget_task(saved: SavedSession, place: str, files: Path) -> None:
    from hermitcrab import snapshots

    store = Store()
    if (end_task := registry.get(saved.on).end_task) is not None:
        end_task(saved.task)  # a sandbox that stays after its cleanup
    if latest := store.latest(Slot(saved.on, saved.task, place)):
        snapshots.forget_snapshot(latest, store)
    remove_tree(files)
    snapshots.reap(store)  # perhaps an image that only this one ran from
