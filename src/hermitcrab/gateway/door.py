"""What every request passes: who asks, how much it may bring, where it is answered, how it is counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hermitcrab.gateway.answers import fault_of, internal, refusal
from hermitcrab.gateway.calls import Call, Context, is_id
from hermitcrab.gateway.identity import ANYBODY, Identity
from hermitcrab.gateway.lean import LeanRoute
from hermitcrab.gateway.records import GatewayFault, unknown_exec, unknown_sandbox
from hermitcrab.gateway.wire import EXTENSIONS, EXTENSIONS_VERSION

_log = logging.getLogger("hermitcrab.gateway")
_HEADERS = (
    (EXTENSIONS.encode(), EXTENSIONS_VERSION.encode()),
    # What a sandbox printed or wrote is never taken for a page by a browser.
    (b"x-content-type-options", b"nosniff"),
)
_UNMATCHED = "unmatched"


class Door:
    """In front of the application. Paths outside of /v1/ and /metrics are open to everybody."""

    def __init__(self, inner: ASGIApp, context: Context, lean: Mapping[tuple[str, int], LeanRoute]) -> None:
        """`lean`: routes of commands that are gone to directly, past all that could handle others."""
        self._inner, self._context, self._lean = inner, context, lean

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answered(scope, receive, send)
        elif scope["type"] == "websocket":
            await self._connected(scope, receive, send)
        else:
            await self._inner(scope, receive, send)

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, status = time.perf_counter(), 0

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        try:
            await self._served(scope, receive, counted)
        except ClientDisconnect:
            pass
        except Exception as error:
            # In the middle of an answer Starlette wraps what its handlers would have taken.
            wrapped = error.__cause__ if status else None
            fault = fault_of(wrapped if isinstance(wrapped, Exception) else error)
            if fault is None:
                _log.error("%s %s", scope["method"], scope["path"], exc_info=error)
            if status:
                raise  # half an answer is out: the connection has to break
            if fault is not None and fault.status in (401, 403):
                self._refused(scope, fault)
            await refusal(fault or internal())(scope, receive, counted)
        finally:
            route = scope.get("route")
            name = f"{scope['method']} {route.path}" if route is not None else _UNMATCHED
            self._context.metrics.observed(name, status, time.perf_counter() - began)

    async def _connected(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A websocket that is refused before it is accepted gets an HTTP answer, where the server can."""
        answered = False

        async def noted(message: Message) -> None:
            nonlocal answered
            answered = True
            await send(message)

        try:
            await self._served(scope, receive, noted)
        except Exception as error:
            fault = fault_of(error)
            if fault is None:
                _log.error("%s", scope["path"], exc_info=error)
            elif fault.status in (401, 403):
                self._refused(scope, fault)
            if not answered:
                await _deny(fault or internal(), scope, receive, send)

    async def _served(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if not path.startswith("/v1/") and path != "/metrics":
            await self._inner(scope, receive, send)
            return
        call = Call(self._context, await self._identity(scope, path), scope)
        if scope["type"] == "http" and scope["method"] != "GET":
            receive = within(scope, receive, _most_bytes(call, scope, path))
        parts = path.split("/")
        if len(parts) < 4 or parts[2] != "sandboxes" or not parts[3]:
            await self._inner(scope, receive, send)
            return
        if not is_id(parts[3]):
            raise unknown_sandbox()
        if len(parts) > 5 and parts[4] == "execs" and not is_id(parts[5]):
            raise unknown_exec()
        elsewhere = await call.gateway.holder(call.tenant, parts[3])
        if elsewhere is not None:
            await self._context.peers.forward(elsewhere, scope, receive, send)
            return
        lean = self._lean.get((scope.get("method", ""), len(parts)))
        if lean is None or parts[4] != "execs":
            await self._inner(scope, receive, send)
            return
        scope["route"] = lean
        scope["path_params"] = dict(zip(("sandbox_id", "exec_id"), parts[3::2], strict=False))
        await lean.app(scope, receive, send)

    async def _identity(self, scope: Scope, path: str) -> Identity:
        if path == "/metrics" and self._context.settings.server.open_metrics:
            return ANYBODY
        return await self._context.doorkeeper.identify(HTTPConnection(scope))

    def _refused(self, scope: Scope, fault: GatewayFault) -> None:
        client = scope.get("client")
        self._context.audit.refused(
            address=client[0] if client else "", status=fault.status, path=scope["path"]
        )


def _most_bytes(call: Call, scope: Scope, path: str) -> int:
    uploads = scope["method"] == "PUT" and path.endswith("/files")
    return call.limits.file_bytes if uploads else call.limits.request_bytes


def within(scope: Scope, receive: Receive, most: int) -> Receive:
    """The same, but no more than so many bytes of body."""
    announced = next((value for name, value in scope["headers"] if name == b"content-length"), None)
    if announced is not None:
        if not announced.isdigit() or int(announced) > most:
            raise _too_large(most)
        return receive  # more than was announced does not come
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise _too_large(most)
        return message

    return bounded


def _too_large(most: int) -> HTTPException:
    return HTTPException(413, f"The body has more than {most} bytes.")


async def _deny(fault: GatewayFault, scope: Scope, receive: Receive, send: Send) -> None:
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": fault.code})
        return

    async def as_denial(message: Message) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    await refusal(fault)({**scope, "type": "http"}, receive, as_denial)
