"""Server-sent events, as a gateway of ours sends them: bytes to events. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple


class Event(NamedTuple):
    kind: str
    data: dict[str, Any]


class Events:
    """Events in the order in which they come; comments and what is no event are left out."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Event]:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        for block in blocks:
            fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line[1:])
            if b"event" in fields and b"data" in fields:
                yield Event(fields[b"event"].decode(), json.loads(fields[b"data"]))
