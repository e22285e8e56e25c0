"""Vercel Sandbox: a microVM per session, by Vercel's own Python SDK (`pip install 'hermitcrab[vercel]'`)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from hermitcrab.backends.clouds import kind
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.vercel.config import RestoredConfig, VercelConfig, refuse
from hermitcrab.backends.vercel.failures import OIDC, PROJECT, TEAM, TOKEN
from hermitcrab.backends.vercel.provider import Vercel

_VERCEL = Vercel()
_PATIENCE = 10.0


class _StoppingSnapshots(ProviderSnapshots):
    """Vercel stops a sandbox when it makes a snapshot of it. The next command goes on from there."""

    async def save(self, sandbox: Any, config: Any, id: str) -> str:
        reference = await super().save(sandbox, config, id)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                await sandbox.gone()  # who asks afterwards finds it lost, not about to be
        return reference


BACKEND = kind.backend(
    _VERCEL,
    summary="a microVM per session at Vercel",
    config=VercelConfig,
    refuse=refuse,
    target="image",
    needs=f"{TOKEN}, {TEAM} and {PROJECT}, or {OIDC}",
    snapshots=_StoppingSnapshots(_VERCEL, RestoredConfig),
)
