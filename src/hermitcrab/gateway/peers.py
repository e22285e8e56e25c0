"""Requests for a sandbox that another gateway on the same database holds: passed on, as streams."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import quote

import httpx
import websockets
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.asyncio.client import ClientConnection, connect

from hermitcrab.gateway.records import GatewayFault

FORWARDED = "x-hermitcrab-forwarded"
"""Says that a request comes from another gateway: nobody passes it on again."""
# Of one connection only (RFC 9110, 7.6.1), or written anew by whoever sends.
_ONE_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host "
    b"sec-websocket-key sec-websocket-version sec-websocket-extensions date x-hermitcrab-gateway "
    b"x-content-type-options".split()
)
_PATIENCE = httpx.Timeout(connect=2.0, read=None, write=60.0, pool=5.0)
_RETRY = 1.0


class Peers:
    """The way to the other gateways."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._client = httpx.AsyncClient(timeout=_PATIENCE, limits=limits, follow_redirects=False)

    async def close(self) -> None:
        await self._client.aclose()

    async def forward(self, url: str, scope: Scope, receive: Receive, send: Send) -> None:
        """The peer's answer is ours."""
        if any(name == FORWARDED.encode() for name, _ in scope["headers"]):
            raise _moving()
        if scope["type"] == "websocket":
            await self._forward_socket(url, WebSocket(scope, receive, send))
            return
        request = self._client.build_request(
            scope["method"],
            url.rstrip("/") + _target(scope),
            headers=_passed(scope),
            content=_body(scope, receive),
        )
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.TransportError:
            # It may be dead; soon somebody has taken its sandboxes over.
            raise _moving() from None
        try:
            passed = StreamingResponse(answer.aiter_raw(), status_code=answer.status_code)
            passed.raw_headers = [each for each in answer.headers.raw if each[0].lower() not in _ONE_HOP]
            await passed(scope, receive, send)
        finally:
            await answer.aclose()

    async def _forward_socket(self, url: str, socket: WebSocket) -> None:
        target = url.rstrip("/").replace("http", "ws", 1) + _target(socket.scope)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in _passed(socket.scope)]
        try:
            async with connect(target, additional_headers=headers, compression=None, open_timeout=10) as peer:
                await socket.accept()
                await _joined(socket, peer)
        except websockets.InvalidStatus as error:
            status = error.response.status_code
            raise GatewayFault(status, "refused", "The gateway that holds it refused.") from None
        except (OSError, TimeoutError, websockets.WebSocketException, ssl.SSLError):
            raise _moving() from None


def _moving() -> GatewayFault:
    return GatewayFault(
        503, "gateway_unreachable", "The gateway that holds this sandbox does not answer.", retry_after=_RETRY
    )


def _target(scope: Scope) -> str:
    path = scope.get("raw_path") or quote(scope["path"]).encode()
    query = scope["query_string"]
    return (path + b"?" + query if query else path).decode("latin-1")


def _passed(scope: Scope) -> list[tuple[bytes, bytes]]:
    kept = [(name, value) for name, value in scope["headers"] if name not in _ONE_HOP]
    return [*kept, (FORWARDED.encode(), b"1")]


def _body(scope: Scope, receive: Receive) -> AsyncIterator[bytes] | None:
    has_one = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
    return aiter(Request(scope, receive).stream()) if has_one else None


async def _joined(socket: WebSocket, peer: ClientConnection) -> None:
    """Until either side closes."""
    tasks = [asyncio.create_task(_outwards(socket, peer)), asyncio.create_task(_inwards(socket, peer))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    with suppress(RuntimeError):  # the client closed it
        await socket.close(peer.close_code or 1000)


async def _outwards(socket: WebSocket, peer: ClientConnection) -> None:
    async for message in peer:
        await (socket.send_text(message) if isinstance(message, str) else socket.send_bytes(message))


async def _inwards(socket: WebSocket, peer: ClientConnection) -> None:
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        data = message.get("bytes")
        await peer.send(message["text"] if data is None else data)
