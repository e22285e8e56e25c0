"""What is ours at a provider, without an environment: the credentials, the labels, `ps` and `reap`."""

from __future__ import annotations

import asyncio
import time
from importlib import import_module
from typing import Any

from hermitcrab import __version__
from hermitcrab.backends.clouds.provider import Provider, Rented
from hermitcrab.backends.clouds.retry import persistently
from hermitcrab.core import loop
from hermitcrab.core.owner import Owner, alive, this_owner
from hermitcrab.core.protocols import Health, Listed
from hermitcrab.errors import BackendUnavailable, SandboxError, SandboxStartError

OURS, OWNER, TASK, VERSION = "hermitcrab", "hermitcrab.owner", "hermitcrab.task", "hermitcrab.version"
MARK = {OURS: "1"}
"""What all of ours have, to be listed by."""
_ASK_SECONDS = 10.0


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
    return [_listed(each) for each in loop.run(_rented(provider))]


def reap(provider: Provider[Any]) -> list[Listed]:
    """Remove those whose owners are dead on this machine; others end by their time limit."""
    orphans = [each for each in sandboxes(provider) if each.orphaned]
    for each in orphans:
        loop.run(_remove(provider, each.id))
    return orphans


async def _greeted(provider: Provider[Any]) -> str:
    try:
        async with asyncio.timeout(_ASK_SECONDS):
            return await provider.greet()
    except TimeoutError:
        raise SandboxStartError(f"{provider.title} does not answer within {_ASK_SECONDS:g} s") from None
    except Exception as error:
        raise provider.understood(error).error from error


async def _rented(provider: Provider[Any]) -> list[Rented]:
    return await persistently(provider.rented, provider.understood)


async def _remove(provider: Provider[Any], id: str) -> None:
    await persistently(lambda: provider.remove(id), provider.understood)


def _listed(rented: Rented) -> Listed:
    owner = Owner.parse(rented.labels.get(OWNER, ""))
    living = alive(owner) if owner else None
    return Listed(
        id=rented.id,
        detail=rented.made_from,
        task=rented.labels.get(TASK, ""),
        owner="elsewhere" if owner is None or living is None else f"pid {owner.pid}",
        orphaned=living is False,
        age=time.time() - rented.started,
    )
