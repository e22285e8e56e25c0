"""A terminal in a sandbox over a websocket.

The client sends bytes for what is typed and `{"resize": [ROWS, COLUMNS]}` as text; it is sent bytes for what
appears, and `{"exit": STATUS}` as text before the socket is closed.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.websockets import WebSocket, WebSocketDisconnect

from hermitcrab.errors import SandboxError
from hermitcrab.gateway.calls import RENEWED_SECONDS, Call, Called
from hermitcrab.gateway.contracts import Terminal

router = APIRouter()
_MOST = 1000
_POLICY = 1008
Size = Annotated[int, Query(ge=1, le=_MOST)]


@router.websocket("/v1/sandboxes/{sandbox_id}/terminal")
async def terminal(
    socket: WebSocket, call: Called, sandbox_id: str, rows: Size = 24, columns: Size = 80
) -> None:
    with call.context.admission.stream(call.tenant), call.context.waiting.entered():
        # Before the socket is accepted: a refusal is a plain HTTP answer then.
        shell = await call.gateway.terminal(call.tenant, sandbox_id, rows, columns)
        call.note("terminal.open", sandbox=sandbox_id)
        try:
            await socket.accept()
            await _converse(socket, shell, call)
        finally:
            await shell.kill()
            call.note("terminal.close", sandbox=sandbox_id)


async def _converse(socket: WebSocket, shell: Terminal, call: Call) -> None:
    """Until the shell ends, the client goes or is not welcome any more."""
    showing = asyncio.create_task(_shown(socket, shell))
    tasks = [showing, asyncio.create_task(_typed(socket, shell)), asyncio.create_task(_renewed(call))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with suppress(RuntimeError, WebSocketDisconnect):  # it may be gone
            if showing.done() and showing.exception() is None:
                await socket.send_text(json.dumps({"exit": await shell.wait()}))
                await socket.close()
            else:
                await socket.close(_POLICY)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _renewed(call: Call) -> None:
    while True:
        await asyncio.sleep(RENEWED_SECONDS)
        await call.renew()


async def _shown(socket: WebSocket, shell: Terminal) -> None:
    async for data in shell.output():
        await socket.send_bytes(data)


async def _typed(socket: WebSocket, shell: Terminal) -> None:
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        if (data := message.get("bytes")) is not None:
            await shell.write(data)
        elif (size := _size(message.get("text") or "")) is not None:
            with suppress(SandboxError):  # it ended meanwhile
                await shell.resize(*size)


def _size(text: str) -> tuple[int, int] | None:
    """What is no size is ignored."""
    try:
        rows, columns = json.loads(text)["resize"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    whole = isinstance(rows, int) and isinstance(columns, int)
    return (rows, columns) if whole and 0 < rows <= _MOST and 0 < columns <= _MOST else None
