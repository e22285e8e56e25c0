"""Vercel Sandbox: a microVM per session, by Vercel's own Python SDK (`pip install 'hermitcrab[vercel]'`)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.vercel.config import NAME, RestoredConfig, VercelConfig, refuse
from hermitcrab.backends.vercel.failures import OIDC, PROJECT, TEAM, TOKEN
from hermitcrab.backends.vercel.provider import Vercel
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Luggage, Traits

_VERCEL = Vercel()
_PATIENCE = 10.0


class _StoppingSnapshots(ProviderSnapshots):
    """Vercel stops a sandbox when it makes a snapshot of it. The next command goes on from there."""

    async def save(self, sandbox: Any, config: Any, id: str) -> str:
        reference = await super().save(sandbox, config, id)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await sandbox.until_lost()
        return reference


async def start(config: VercelConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    refuse(config)
    return await stay.start(_VERCEL, config)


BACKEND = Backend(
    name=NAME,
    summary="a microVM per session at Vercel",
    config=VercelConfig,
    traits=Traits(isolated=True, network="own", creates_cwd=True, revives=True, carries="copies"),
    start=start,
    check=partial(owned.check, _VERCEL),
    target="image",
    needs=f"{TOKEN}, {TEAM} and {PROJECT}, or {OIDC}",
    sandboxes=partial(owned.sandboxes, _VERCEL),
    reap=partial(owned.reap, _VERCEL),
    end_task=partial(owned.end_task, _VERCEL),
    snapshots=_StoppingSnapshots(_VERCEL, RestoredConfig),
)
