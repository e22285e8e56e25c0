"""Daytona: a sandbox per session at daytona.io, through Daytona's own Python SDK
(`pip install 'hermitcrab[daytona]'`)."""

from __future__ import annotations

from hermitcrab.backends.clouds import kind
from hermitcrab.backends.clouds.kept import ProviderSnapshots
from hermitcrab.backends.daytona.config import DaytonaConfig, RestoredConfig, refuse
from hermitcrab.backends.daytona.failures import KEY
from hermitcrab.backends.daytona.provider import Daytona

_DAYTONA = Daytona()

BACKEND = kind.backend(
    _DAYTONA,
    summary="a container or VM per session at daytona.io",
    config=DaytonaConfig,
    refuse=refuse,
    target="image",
    needs=KEY,
    snapshots=ProviderSnapshots(_DAYTONA, RestoredConfig),
)
