"""Words for bash that stand for exact bytes."""

from __future__ import annotations

import re

_SAFE = re.compile(rb"[A-Za-z0-9_./:@%+,-]+")
_UNUSUAL = re.compile(rb"[\x00-\x1f\x7f-\xff]+")
_OCTAL = [b"\\%03o" % byte for byte in range(256)]


def quote(text: str | bytes) -> bytes:
    """One word of bash that stands for exactly these bytes: plain ASCII, so that any locale reads it alike,
    and without a line break."""
    data = text if isinstance(text, bytes) else encode(text)
    if _SAFE.fullmatch(data):
        return data
    data = data.replace(b"\\", b"\\\\").replace(b"'", b"\\'").replace(b"\n", b"\\n")
    return b"$'" + _UNUSUAL.sub(_in_octal, data) + b"'"


def _in_octal(match: re.Match[bytes]) -> bytes:
    return b"".join([_OCTAL[byte] for byte in match[0]])


def encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
