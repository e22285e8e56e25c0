"""Our labels as tags at Modal, which hold 63 characters of a small alphabet."""

from __future__ import annotations

import re
from collections.abc import Mapping

LONGEST = 63
_NOTHING = "_"
"""A tag cannot be empty."""

_UNSAFE = re.compile(rb"[^A-Za-z0-9.-]")
_ESCAPED = re.compile(rb"_([0-9a-f]{2})")


def tags_of(labels: Mapping[str, str]) -> dict[str, str]:
    """A value is escaped, and goes on in NAME.1, NAME.2 and so on where it is too long."""
    return {
        f"{name}.{number}" if number else name: piece
        for name, value in labels.items()
        for number, piece in enumerate(_pieces(_escaped(value)))
    }


def labels_of(tags: Mapping[str, str]) -> dict[str, str]:
    """What `tags_of` was given. Tags of others come back as they may."""
    found: dict[str, str] = {}
    for name in sorted(tags, key=_place):
        whole, _, number = name.rpartition(".")
        if number.isdecimal() and whole in found:
            found[whole] += tags[name]
        else:
            found[name] = tags[name]
    return {name: _plain(value) for name, value in found.items()}


def _escaped(value: str) -> str:
    return _UNSAFE.sub(lambda match: b"_%02x" % match[0][0], value.encode()).decode()


def _plain(value: str) -> str:
    if value == _NOTHING:
        return ""
    known = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), value.encode())
    return known.decode(errors="replace")


def _pieces(value: str) -> list[str]:
    return [value[start : start + LONGEST] for start in range(0, len(value), LONGEST)] or [_NOTHING]


def _place(name: str) -> tuple[str, int]:
    whole, _, number = name.rpartition(".")
    return (whole, int(number)) if number.isdecimal() else (name, 0)
