"""Whose a container is: the labels that say so, and what follows from them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from hermitcrab import __version__
from hermitcrab.core.owner import Owner as Owner
from hermitcrab.core.owner import alive as alive
from hermitcrab.core.owner import this_owner as this_owner

OWNER, TASK, FINGERPRINT = "hermitcrab.owner", "hermitcrab.task", "hermitcrab.fingerprint"
VERSION, LIFETIME = "hermitcrab.version", "hermitcrab.lifetime"
USER, TOKEN, LACKS = "hermitcrab.user", "hermitcrab.token", "hermitcrab.lacks"
ATTACHED, DETACHED = "attached", "detached"
PAUSED = "paused"
RESERVED = "hermitcrab."


class Found(NamedTuple):
    """A container of ours, as the engine lists it."""

    name: str
    image: str
    state: str
    created: str
    labels: Mapping[str, str]

    @property
    def owner(self) -> Owner | None:
        return Owner.parse(self.labels.get(OWNER, ""))

    @property
    def task(self) -> str:
        return self.labels.get(TASK, "")


class Fate(Enum):
    """What becomes of the containers that a task already has."""

    NEW = "there is none"
    REUSE = "it fits"
    REPLACE = "it was made otherwise, or has ended"


def labels(lifetime: str) -> dict[str, str]:
    """What every container of ours has."""
    return {OWNER: str(this_owner()), LIFETIME: lifetime, VERSION: __version__}


def orphans(found: Iterable[Found]) -> list[str]:
    """The attached containers whose owner is known to be dead. Detached ones end by their lease."""
    return [
        each.name
        for each in found
        if each.labels.get(LIFETIME) != DETACHED and each.owner is not None and alive(each.owner) is False
    ]


def fate(found: Iterable[Found], fingerprint: str) -> tuple[Fate, list[str]]:
    """What to do for a task, with which of its containers."""
    containers = list(found)
    for each in containers:
        if each.state in ("running", PAUSED) and each.labels.get(FINGERPRINT) == fingerprint:
            return Fate.REUSE, [each.name]
    return (Fate.REPLACE if containers else Fate.NEW), [each.name for each in containers]


def fingerprint(**what: Any) -> str:
    """A short name for everything that must be equal for a container to be used again."""
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
