"""A client's connection as uvicorn has it, with an end to how slow a request, how large its head is."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

HEAD_BYTES = 64 << 10
HEAD_SECONDS = 20.0
BODY_SECONDS = 30.0
"""Between two pieces of a body."""
_HELD_BYTES = 32 << 10


class Joined:
    """A transport that sends what is written in one moment as one: a head and its body wake a client once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._held: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        self._held.append(data)
        self._size += len(data)
        if self._size > _HELD_BYTES:
            self._flush()  # so that the transport can say when it is too much
        elif len(self._held) == 1:
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._held:
            data = b"".join(self._held)
            self._held.clear()
            self._size = 0
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(HttpToolsProtocol):
    """A request that comes at once costs nothing; for any other a clock runs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._in_head, self._in_body = True, False
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Joined(transport, self.loop))  # type: ignore[arg-type]
        self._clock = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(431, "The head of the request is too large.")
            elif self._clock is None:
                self._clock = self.loop.call_later(HEAD_SECONDS, self._too_slow)
        elif self._in_body:
            self._stop_clock()
            self._clock = self.loop.call_later(BODY_SECONDS, self._too_slow)

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._stop_clock()
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def _too_slow(self) -> None:
        if self._in_body and self.flow.read_paused:
            self._clock = self.loop.call_later(BODY_SECONDS, self._too_slow)  # it is us who do not read
        else:
            self._refuse(408, "The request did not come.")

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _refuse(self, status: int, words: str) -> None:
        self._stop_clock()
        if self.transport.is_closing():
            return
        if not (self._in_body and self.cycle.response_started):
            body = b'{"error":"%s","code":"bad_http"}' % words.encode()
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(STATUS_LINE[status] + head % len(body) + body)
        self.transport.close()
