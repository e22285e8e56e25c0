"""E2B: a microVM per session at e2b.dev, through E2B's own Python SDK (`pip install 'hermitcrab[e2b]'`)."""

from __future__ import annotations

from hermitcrab.backends.clouds import kind
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.e2b.config import E2BConfig, RestoredConfig, refuse
from hermitcrab.backends.e2b.failures import KEY
from hermitcrab.backends.e2b.provider import E2B

_E2B = E2B()

BACKEND = kind.backend(
    _E2B,
    summary="a microVM per session at e2b.dev",
    config=E2BConfig,
    refuse=refuse,
    target="template",
    needs=KEY,
    snapshots=ProviderSnapshots(_E2B, RestoredConfig),
)
