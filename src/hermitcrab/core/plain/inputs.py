"""The inputs of an exec, which have one pipe between them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

_OURS = -1


class Inputs:
    """Each input has its turn when those of lower numbers are closed.

    So a shell reads its order to the byte, and what follows on the same pipe is the command's stdin.
    """

    def __init__(self, channels: Sequence[int]) -> None:
        self.given = False
        """Whether anything but our own text was passed on."""
        self._waiting: dict[int, deque[bytes]] = {channel: deque() for channel in sorted(channels)}
        self._closed: set[int] = set()
        self._under_way: deque[tuple[int, int]] = deque()

    @property
    def over(self) -> bool:
        """Everything was passed on, and no more will come."""
        return self._closed >= self._waiting.keys() and not any(self._waiting.values())

    def preamble(self, data: bytes) -> bytes:
        """Our own text, which nobody gets credit for."""
        self._under_way.append((_OURS, len(data)))
        return data

    def add(self, channel: int, data: bytes) -> None:
        if channel in self._waiting:
            self._waiting[channel].append(data)

    def close(self, channel: int) -> None:
        self._closed.add(channel)

    def due(self) -> Iterator[bytes]:
        """What may be passed on now."""
        for channel, waiting in self._waiting.items():
            while waiting:
                data = waiting.popleft()
                self.given = True
                self._under_way.append((channel, len(data)))
                yield data
            if channel not in self._closed:
                return

    def taken(self, count: int) -> Iterator[tuple[int, int]]:
        """Whose bytes the program took: channel and count."""
        while count and self._under_way:
            channel, size = self._under_way.popleft()
            part = min(count, size)
            count -= part
            if part < size:
                self._under_way.appendleft((channel, size - part))
            if channel != _OURS:
                yield channel, part
