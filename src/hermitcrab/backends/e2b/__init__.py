"""E2B: a microVM per session at e2b.dev, through E2B's own Python SDK (`pip install 'hermitcrab[e2b]'`)."""

from __future__ import annotations

from functools import partial

from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.e2b.config import E2BConfig, RestoredConfig, refuse
from hermitcrab.backends.e2b.failures import KEY, NAME
from hermitcrab.backends.e2b.provider import E2B
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Luggage, Traits

_E2B = E2B()


async def start(config: E2BConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    refuse(config)
    return await stay.start(_E2B, config)


BACKEND = Backend(
    name=NAME,
    summary="a microVM per session at e2b.dev",
    config=E2BConfig,
    traits=Traits(isolated=True, network="own", creates_cwd=True, revives=True, carries="copies"),
    start=start,
    check=partial(owned.check, _E2B),
    target="template",
    needs=KEY,
    sandboxes=partial(owned.sandboxes, _E2B),
    reap=partial(owned.reap, _E2B),
    end_task=partial(owned.end_task, _E2B),
    snapshots=ProviderSnapshots(_E2B, RestoredConfig),
)
