"""What is ours at a provider, without an environment: the credentials, the labels, `ps` and `reap`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from hermitcrab import __version__
from hermitcrab.backends.clouds import tasks
from hermitcrab.backends.clouds.provider import Provider, Rented
from hermitcrab.backends.clouds.retry import persistently
from hermitcrab.backends.clouds.tasks import Note
from hermitcrab.core import loop
from hermitcrab.core.owner import Owner, alive, this_owner
from hermitcrab.core.protocols import Health, Listed
from hermitcrab.errors import BackendUnavailable, SandboxError, SandboxStartError

OURS, OWNER, TASK, VERSION = "hermitcrab", "hermitcrab.owner", "hermitcrab.task", "hermitcrab.version"
MARK = {OURS: "1"}
"""What all of ours have, to be listed by."""
_ASK_SECONDS = 10.0
_LIST_SECONDS = 20.0

_log = logging.getLogger("hermitcrab.clouds")


def labels(task: str) -> dict[str, str]:
    return {**MARK, OWNER: str(this_owner()), VERSION: __version__, **({TASK: task} if task else {})}


def check(provider: Provider[Any]) -> Health:
    """Whether the SDK is there, and the provider takes our credentials. Nothing is created."""
    if problem := provider.missing():
        return problem
    import_module(provider.module)  # it takes its time, which is not the provider's
    try:
        return Health(True, loop.run(_greeted(provider)))
    except SandboxError as error:
        hint = error.hint if isinstance(error, BackendUnavailable) else ""
        return Health(False, str(error).removesuffix(hint).strip(), hint)


def sandboxes(provider: Provider[Any]) -> list[Listed]:
    """Those of ours that the provider has."""
    if provider.missing():
        return []  # whoever never came here left nothing here
    known = tasks.by_id(provider.name)
    return [_listed(each, known.get(each.id)) for each in loop.run(_rented(provider))]


def reap(provider: Provider[Any]) -> list[Listed]:
    """Remove those whose owners are dead on this machine; others end by their time limit."""
    removed = []
    for each in [each for each in sandboxes(provider) if each.orphaned]:
        try:
            loop.run(remove(provider, each.id))
        except SandboxError as error:
            _log.warning("the sandbox %s was not removed: %s", each.id, error)
            continue
        tasks.forget(provider.name, each.task, each.id)
        removed.append(each)
    return removed


def end_task(provider: Provider[Any], task: str) -> bool:
    """Remove what runs for a task of this user."""
    note = tasks.read(provider.name, task)
    if note is None:
        return False
    loop.run(remove(provider, note.id))
    tasks.forget(provider.name, task, note.id)
    return True


async def remove(provider: Provider[Any], id: str) -> None:
    await persistently(lambda: provider.remove(id), provider.understood)


async def _greeted(provider: Provider[Any]) -> str:
    try:
        async with _answering(provider, _ASK_SECONDS):
            return await provider.greet()
    except Exception as error:
        raise provider.understood(error).error from error


async def _rented(provider: Provider[Any]) -> list[Rented]:
    async with _answering(provider, _LIST_SECONDS):
        return await persistently(provider.rented, provider.understood)


@asynccontextmanager
async def _answering(provider: Provider[Any], seconds: float) -> AsyncIterator[None]:
    """Some SDKs look for a provider that is out of reach for minutes; a person waits here."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            yield
    except TimeoutError:
        if not deadline.expired():
            raise
        raise SandboxStartError(f"{provider.title} does not answer within {seconds:g} s") from None


def _listed(rented: Rented, note: Note | None) -> Listed:
    """A note knows better than the label, which says who made it."""
    owner = Owner.parse(note.owner if note else rented.labels.get(OWNER, ""))
    living = alive(owner) if owner else None
    left = "left by " if note and note.left else ""
    return Listed(
        id=rented.id,
        detail=rented.made_from,
        task=rented.labels.get(TASK, ""),
        owner="elsewhere" if owner is None or living is None else f"{left}pid {owner.pid}",
        orphaned=note.orphaned if note else living is False,
        age=time.time() - rented.started,
    )
