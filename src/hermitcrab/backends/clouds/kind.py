"""A backend out of a provider."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.clouds.provider import Provider, Terms
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Luggage, Traits

C = TypeVar("C", bound=Terms)


def backend(
    provider: Provider[C],
    *,
    summary: str,
    config: type[C],
    refuse: Callable[[C], None],
    target: str,
    needs: str,
    snapshots: ProviderSnapshots,
) -> Backend[C]:
    """`refuse` raises ConfigError for what the types of the config let through."""

    async def start(config: C, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
        refuse(config)
        return await stay.start(provider, config)

    return Backend(
        name=provider.name,
        summary=summary,
        config=config,
        traits=Traits(isolated=True, network="own", creates_cwd=True, revives=True, carries="copies"),
        start=start,
        rejoin=partial(stay.rejoin, provider),
        check=partial(owned.check, provider),
        target=target,
        needs=needs,
        sandboxes=partial(owned.sandboxes, provider),
        reap=partial(owned.reap, provider),
        end_task=partial(owned.end_task, provider),
        snapshots=snapshots,
    )
