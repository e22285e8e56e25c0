"""Modal: a container per session at modal.com, by Modal's own SDK (`pip install 'hermitcrab[modal]'`)."""

from __future__ import annotations

from hermitcrab.backends.clouds import kind
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.modal.config import ModalConfig, RestoredConfig, refuse
from hermitcrab.backends.modal.provider import Modal

_MODAL = Modal()

BACKEND = kind.backend(
    _MODAL,
    summary="a container per session at modal.com",
    config=ModalConfig,
    refuse=refuse,
    target="image",
    needs="`modal token new`, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET",
    snapshots=ProviderSnapshots(_MODAL, RestoredConfig),
)
