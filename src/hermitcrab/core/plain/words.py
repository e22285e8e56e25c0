"""What our own text in a sandbox says, among whatever else is written to the same stream. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_ESCAPES = {b"\\\\": b"\\", b"\\n": b"\n", b"\\0": b"\0"}


def unescape(text: bytes) -> bytes:
    """What `relay` was given."""
    return re.sub(rb"\\[\\n0]", lambda match: _ESCAPES[match[0]], text)


class Word(NamedTuple):
    """Something that our own text in the sandbox says."""

    name: str
    rest: bytes = b""


class Words:
    """Tells our own words in a stream from what else is written to it."""

    def __init__(self, nonce: bytes, lead: bytes = b"\0") -> None:
        """`lead` begins each word, before the nonce."""
        self._mark = lead + nonce + b" "
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[bytes | Word]:
        data = self._rest + data
        while (at := data.find(self._mark)) >= 0 and (end := data.find(b"\n", at)) >= 0:
            if at:
                yield data[:at]
            name, _, rest = data[at + len(self._mark) : end].partition(b" ")
            yield Word(name.decode(errors="replace"), rest)
            data = data[end + 1 :]
        # Only what may become a word is held back.
        if at < 0:
            at = len(data) - self._begun(data)
        self._rest = data[at:]
        if at:
            yield data[:at]

    def flush(self) -> bytes:
        rest, self._rest = self._rest, b""
        return rest

    def _begun(self, data: bytes) -> int:
        """How many of the last bytes could be the beginning of a word."""
        at = max(0, len(data) - len(self._mark))
        while (at := data.find(self._mark[:1], at)) >= 0:
            if self._mark.startswith(data[at:]):
                return len(data) - at
            at += 1
        return 0
