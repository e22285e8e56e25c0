"""A provider's application behind a port of its own: faults that a test orders, a record of every call."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.clouds.engine import Engine

ORDERS = "/test-orders/"
"""Where tests speak to the server; no provider has such a path."""


class Cut(Exception):
    """Ends a connection in the middle of an answer."""


@dataclass
class Fault:
    """What happens to the next calls of a path, instead of the usual or in the middle of it."""

    path: str
    """A regular expression for "METHOD /path"."""
    times: int = 1
    status: int = 0
    """Answer with that, and do nothing. Of a websocket that is cut, what it is closed with."""
    message: str = "ordered by a test"
    headers: Mapping[str, str] = field(default_factory=dict)
    afterwards: bool = False
    """Do what was asked before answering with the status: the caller cannot know."""
    cut_after: int | None = None
    """Break the connection when so many bytes of the answer's body were sent."""
    pending: bool = False
    """Do not answer, until the caller gives up."""


class Provider:
    """The wire format of one provider."""

    name: str

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def application(self) -> ASGIApp:
        raise NotImplementedError

    def variables(self, url: str) -> Mapping[str, str]:
        """What the SDK needs to find us."""
        raise NotImplementedError

    async def listen(self, server: Server) -> None:
        """Serve what is not ASGI, on a port of its own and with the server's faults."""

    def refusal(self, status: int, message: str) -> bytes:
        """The body of an error, as this provider words it."""
        raise NotImplementedError


class Server:
    """The provider's application, within the faults and beside the orders of tests."""

    def __init__(self, provider: Provider) -> None:
        self._provider = provider
        self._engine = provider.engine
        self._inner = provider.application()
        self._faults: list[Fault] = []
        self._calls: list[str] = []
        self._under_way: dict[asyncio.Task[Any], str] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._serve_socket(scope, receive, send)
        elif scope["path"].startswith(ORDERS):
            answer = await self._obey(Request(scope, receive))
            await answer(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = f"{scope['method']} {scope['path']}"
        with self.answering(call):
            await self._serve_or_fail(call, scope, receive, send)

    async def _serve_socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = f"GET {scope['path']}"
        with self.answering(call):
            fault = self.fault_for(call)
            if fault is None:
                await self._inner(scope, receive, send)
            elif fault.pending:
                while (await receive())["type"] != "websocket.disconnect":
                    pass
            elif fault.cut_after is not None:
                try:
                    await self._inner(scope, receive, _cutting(send, fault.cut_after))
                except Cut:
                    if not fault.status:
                        raise
                    await send({"type": "websocket.close", "code": fault.status, "reason": fault.message})
            else:
                body = self._provider.refusal(fault.status, fault.message)
                refusal = {"type": "websocket.http.response.start", "status": fault.status, "headers": []}
                await send(refusal)
                await send({"type": "websocket.http.response.body", "body": body})

    @contextmanager
    def answering(self, call: str) -> Iterator[None]:
        """Note a call, which `order_cut` may cancel the task of meanwhile."""
        self._calls.append(call)
        task = asyncio.current_task()
        assert task is not None
        self._under_way[task] = call
        try:
            yield
        finally:
            del self._under_way[task]

    async def _serve_or_fail(self, call: str, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self.fault_for(call)
        if fault is None:
            await self._inner(scope, receive, send)
        elif fault.pending:
            while (await receive())["type"] != "http.disconnect":
                pass
        elif fault.cut_after is not None:
            await self._inner(scope, receive, _cutting(send, fault.cut_after))
        else:
            if fault.afterwards:
                await self._inner(scope, receive, _swallow)
            body = self._provider.refusal(fault.status, fault.message)
            headers = {"content-type": "application/json", **fault.headers}
            await Response(body, fault.status, headers)(scope, receive, send)

    def fault_for(self, call: str) -> Fault | None:
        for fault in self._faults:
            if fault.times > 0 and re.search(fault.path, call):
                fault.times -= 1
                return fault
        return None

    async def _obey(self, request: Request) -> Response:
        order: Callable[..., Any] = getattr(self, "order_" + request.url.path.removeprefix(ORDERS))
        return JSONResponse(await order(**json.loads(await request.body() or b"{}")))

    async def order_fault(self, **fault: Any) -> None:
        self._faults.append(Fault(**fault))

    async def order_cut(self, path: str) -> int:
        """Break the connections of what is being answered now."""
        cut = [task for task, call in self._under_way.items() if re.search(path, call)]
        for task in cut:
            task.cancel()
        return len(cut)

    async def order_heal(self) -> None:
        self._faults.clear()

    async def order_calls(self, forget: bool = False) -> list[str]:
        """What was asked for since the last time that this was asked with `forget`."""
        calls = list(self._calls)
        if forget:
            self._calls.clear()
        return calls

    async def order_boxes(self) -> list[dict[str, Any]]:
        return [
            {
                "id": box.id,
                "state": box.state,
                "labels": box.labels,
                "made_from": box.made_from,
                "network": box.network,
                "expires": box.expires,
                "programs": len(box.programs),
                "settings": box.settings,
            }
            for box in self._engine.boxes.values()
        ]

    async def order_stop(self, id: str, state: str = "stopped") -> None:
        await self._engine.stop(self._engine.boxes[id], state)

    async def order_expire(self, id: str) -> None:
        self._engine.live(self._engine.boxes[id], 0)

    async def order_vanish(self, id: str) -> None:
        await self._engine.vanish(self._engine.boxes[id])

    async def order_expire_snapshot(self, id: str) -> None:
        del self._engine.snapshots[id]

    async def order_snapshots(self) -> list[str]:
        return list(self._engine.snapshots)


def _cutting(send: Send, bytes_left: int) -> Send:
    async def cut(message: Message) -> None:
        nonlocal bytes_left
        body = message.get("body") or message.get("bytes") or b""
        if len(body) > bytes_left:
            if bytes_left and message["type"] == "http.response.body":
                await send({**message, "body": body[:bytes_left], "more_body": True})
            raise Cut
        bytes_left -= len(body)
        await send(message)

    return cut


async def _swallow(message: MutableMapping[str, Any]) -> None:
    pass


def main(make: Callable[[Engine], Provider]) -> None:
    """Serve on a free port, say which, and go when whoever started us closes our stdin."""
    asyncio.run(_main(make))


async def _main(make: Callable[[Engine], Provider]) -> None:
    engine = Engine()
    provider = make(engine)
    # With the protocol named, or asyncio does not turn Nagle's algorithm off: 40 ms for every answer.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    application = Server(provider)
    await provider.listen(application)
    config = uvicorn.Config(
        application, log_level="critical", lifespan="off", timeout_keep_alive=600, ws="wsproto"
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    json.dump({"url": url, "variables": dict(provider.variables(url))}, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), over.set)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    await over.wait()
    await engine.close()
    server.should_exit = server.force_exit = True
    await serving
