"""microsandbox: a microVM per session on this machine, by its Python SDK or else its command `msb`.

config.py     the settings
preflight.py  what this machine lacks to run a microVM
engine.py     what is done with VMs by name: sdk.py by the SDK, command.py by `msb`
provider.py   what `backends/clouds` needs to keep a session in one
"""

from __future__ import annotations

import asyncio
from functools import partial

from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.clouds.retry import persistently
from hermitcrab.backends.microsandbox.config import MicrosandboxConfig, RestoredConfig, refuse
from hermitcrab.backends.microsandbox.failures import NAME
from hermitcrab.backends.microsandbox.provider import Microsandbox, find_engine
from hermitcrab.backends.volumes import writable
from hermitcrab.core import loop
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Luggage, Traits

_MICROSANDBOX = Microsandbox()


async def start(config: MicrosandboxConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    refuse(config)
    await asyncio.to_thread(find_engine)  # imports the SDK, for which others on this loop need not wait
    vms = Microsandbox()
    sandbox = await stay.start(vms, config)
    sandbox.joined = sandbox.joined or vms.joined
    return sandbox


def end_task(task: str) -> bool:
    """Also one that was cleaned up, and so is stopped and in nobody's notes."""
    left = owned.end_task(_MICROSANDBOX, task)
    return left if _MICROSANDBOX.absent() else loop.run(_end_task(task)) or left


async def _end_task(task: str) -> bool:
    return await persistently(lambda: _MICROSANDBOX.end_task(task), _MICROSANDBOX.understood)


BACKEND = Backend(
    name=NAME,
    summary="a microVM per session on this machine, by microsandbox",
    config=MicrosandboxConfig,
    traits=Traits(isolated=True, network="own", creates_cwd=True, revives=True, carries="copies"),
    start=start,
    rejoin=partial(stay.rejoin, _MICROSANDBOX),
    check=partial(owned.check, _MICROSANDBOX),
    target="image",
    exposes=lambda config: writable(config.volumes),
    sandboxes=partial(owned.sandboxes, _MICROSANDBOX),
    reap=partial(owned.reap, _MICROSANDBOX),
    end_task=end_task,
    snapshots=ProviderSnapshots(_MICROSANDBOX, RestoredConfig),
    lasting=lambda config: config.persistent_filesystem,
)
