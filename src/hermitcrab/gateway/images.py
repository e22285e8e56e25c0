"""Which image a client gets: what the operator allows, and nothing that an engine would take for a path."""

from __future__ import annotations

import re
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

from hermitcrab.backends import registry
from hermitcrab.core.protocols import Backend
from hermitcrab.gateway.core_settings import EngineSettings
from hermitcrab.gateway.records import GatewayFault

# HOST[:PORT]/PATH:TAG@DIGEST. It begins with a letter or a digit, so it is no option, no absolute path and
# none that leads upwards.
_PART = r"[A-Za-z0-9]+(?:[._-]+[A-Za-z0-9]+)*"
_REFERENCE = rf"{_PART}(?::[0-9]{{1,5}}(?=/))?(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?"
_DIGEST = r"(?:@sha256:[0-9a-f]{64})?"
_SCHEME = r"(?:docker|oras|library)://"
_LONGEST = 512


def image_setting(backend: Backend[Any]) -> str:
    """The name of the setting that a client's image is; empty where there are no images."""
    keys = {each.name for each in fields(backend.config)}
    return next((key for key in ("image", "template") if key in keys), "")


def chosen_image(engine: EngineSettings, asked: str) -> str:
    """What to start for a client that asks for an image, or for none."""
    backend = registry.get(engine.backend)
    if not image_setting(backend):
        return ""  # there is one kind of sandbox only, whatever a client calls it
    if not asked:
        if not engine.image:
            raise GatewayFault(400, "image_missing", "Name an image: this gateway has no choice of its own.")
        return engine.image
    if asked in engine.images:
        return asked
    if any(fnmatchcase(asked, pattern) for pattern in engine.images) and is_reference(asked, engine.backend):
        return asked
    raise GatewayFault(403, "image_not_allowed", "This gateway does not allow that image.")


def is_reference(image: str, backend: str) -> bool:
    """Whether an engine looks for it in a registry, and nowhere on the host."""
    # To Apptainer a name without a scheme is a file.
    scheme = _SCHEME if backend == "apptainer" else ""
    pattern = scheme + _REFERENCE + _DIGEST
    return len(image) <= _LONGEST and re.fullmatch(pattern, image, re.ASCII) is not None
