"""What both sides of a root agreed on, kept for the next program that syncs with the same place."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from hermitcrab.files.manifest import Stamp
from hermitcrab.files.planning import Agreed

_VERSION = 1


class Remembered(NamedTuple):
    """What a program knew of a root when it last succeeded in something."""

    agreement: Mapping[str, Agreed]
    foreign: Mapping[str, Stamp]
    """What the sandbox had before the first sync, and the host never did."""


def save(path: Path, remembered: Remembered) -> None:
    """All at once: a program that is killed meanwhile leaves the old one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    data = {
        "version": _VERSION,
        "agreement": {
            name: [
                each.here,
                each.there,
                sorted(digest.hex() for digest in each.ours),
                each.young,
                each.parted,
            ]
            for name, each in remembered.agreement.items()
        },
        "foreign": remembered.foreign,
    }
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        part.write_text(json.dumps(data), encoding="ascii")
        part.chmod(0o600)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path) -> Remembered | None:
    """None when there is none, or none that makes sense: then it is as at first."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        data = json.loads(path.read_text(encoding="ascii"))
        if data["version"] == _VERSION:
            return Remembered(
                {name: _agreed(*fields) for name, fields in data["agreement"].items()},
                {name: Stamp(*fields) for name, fields in data["foreign"].items()},
            )
    return None


def _agreed(here: Any, there: Any, ours: Any, young: Any, parted: Any) -> Agreed:
    digests = frozenset(bytes.fromhex(digest) for digest in ours)
    return Agreed(Stamp(*here), Stamp(*there), digests, bool(young), bool(parted))
