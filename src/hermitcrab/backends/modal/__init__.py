"""Modal: a container per session at modal.com, by Modal's own SDK (`pip install 'hermitcrab[modal]'`)."""

from __future__ import annotations

from functools import partial

from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.modal.config import ModalConfig, RestoredConfig, refuse
from hermitcrab.backends.modal.failures import NAME
from hermitcrab.backends.modal.provider import Modal
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import NO_LUGGAGE, Backend, Luggage, Traits

_MODAL = Modal()


async def start(config: ModalConfig, luggage: Luggage = NO_LUGGAGE) -> AgentSandbox:
    refuse(config)
    return await stay.start(_MODAL, config)


BACKEND = Backend(
    name=NAME,
    summary="a container per session at modal.com",
    config=ModalConfig,
    traits=Traits(isolated=True, network="own", creates_cwd=True, revives=True, carries="copies"),
    start=start,
    check=partial(owned.check, _MODAL),
    target="image",
    needs="`modal token new`, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET",
    sandboxes=partial(owned.sandboxes, _MODAL),
    reap=partial(owned.reap, _MODAL),
    end_task=partial(owned.end_task, _MODAL),
    snapshots=ProviderSnapshots(_MODAL, RestoredConfig),
)
