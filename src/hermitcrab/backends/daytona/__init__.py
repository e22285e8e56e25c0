"""Daytona: a sandbox per session at daytona.io, through Daytona's own Python SDK
(`pip install 'hermitcrab[daytona]'`)."""

from __future__ import annotations

from functools import partial

from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.daytona.config import DaytonaConfig, RestoredConfig, refuse
from hermitcrab.backends.daytona.failures import KEY, NAME
from hermitcrab.backends.daytona.provider import Daytona
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Luggage, Traits

_DAYTONA = Daytona()


async def start(config: DaytonaConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    refuse(config)
    return await stay.start(_DAYTONA, config)


BACKEND = Backend(
    name=NAME,
    summary="a container or VM per session at daytona.io",
    config=DaytonaConfig,
    traits=Traits(isolated=True, network="own", creates_cwd=True, revives=True, carries="copies"),
    start=start,
    check=partial(owned.check, _DAYTONA),
    target="image",
    needs=KEY,
    sandboxes=partial(owned.sandboxes, _DAYTONA),
    reap=partial(owned.reap, _DAYTONA),
    end_task=partial(owned.end_task, _DAYTONA),
    snapshots=ProviderSnapshots(_DAYTONA, RestoredConfig),
)
