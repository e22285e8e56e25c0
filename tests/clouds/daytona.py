"""Daytona's wire format: its REST interface, its events and the toolbox of each sandbox, on one port.

Requests are read, and answers written, with the SDK's own models. What is not known here is refused.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import daytona_api_client_async as models
import daytona_toolbox_api_client_async as toolbox
import socketio  # type: ignore[import-untyped]
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket, WebSocketDisconnect

from tests.clouds import server
from tests.clouds.engine import HOMES, USER, Box, Engine
from tests.clouds.rest import Refused, RestProvider, parameters, read, refuse_unknown
from tests.clouds.terminals import Terminal

KEY = "dtn_" + "0" * 40
DEFAULT = "daytona-small"
TEMPLATES = {DEFAULT: (1, 1, 3), "daytona-large": (4, 8, 10)}
"""Name -> CPUs, GiB of memory, GiB of disk."""
LARGEST = {"cpu": 4, "memory": 8, "disk": 10}
SLOW, BROKEN, ENDLESS = "slow:1", "broken:1", "endless:1"
"""Images whose sandboxes take a moment, come up broken, and never come up."""
LONGEST_MESSAGE = 64 << 10
MOST_MESSAGES = 256
"""That wait for a client before it is dropped."""
LONGEST_LIFE = 24 * 60
STATES = {"running": "started", "paused": "stopped"}
KNOWN = {
    *("name", "snapshot", "user", "labels", "network_block_all", "cpu", "memory", "disk"),
    *("auto_stop_interval", "ttl_minutes", "build_info"),
}


class Daytona(RestProvider):
    name = "daytona"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._url = ""
        self._snapshots: dict[str, str] = {}
        """Name -> the engine's own."""
        self._asleep: set[str] = set()
        """Names of snapshots that nobody used for long."""
        self._pretended: dict[str, str] = {}
        """Sandbox -> a state that its image gives it."""
        self._terminals: dict[tuple[str, str], Terminal] = {}
        self._events = socketio.AsyncServer(async_mode="asgi")
        self._events.on("connect", self._greeted)

    def variables(self, url: str) -> Mapping[str, str]:
        self._url = url
        return {"DAYTONA_API_KEY": KEY, "DAYTONA_API_URL": f"{url}/api"}

    def refusal(self, status: int, message: str) -> bytes:
        source = "DAYTONA_API"
        error = toolbox.ErrorResponse(
            status_code=status, message=message, path="", timestamp="", source=source
        )
        return json.dumps(error.to_dict()).encode()

    def application(self) -> ASGIApp:
        route, sandbox, tools = self.route, "/api/sandbox/{id}", "/toolbox/{id}"
        rest = Starlette(
            routes=[
                route("POST", "/api/sandbox", self.create),
                route("GET", "/api/sandbox", self.list),
                route("GET", sandbox, self.get),
                route("DELETE", sandbox, self.delete),
                route("POST", f"{sandbox}/start", self.start),
                route("POST", f"{sandbox}/ttl/{{minutes:int}}", self.live),
                route("POST", f"{sandbox}/autostop/{{minutes:int}}", self.stop_later),
                route("POST", f"{sandbox}/last-activity", self.active),
                route("POST", f"{sandbox}/snapshot", self.snapshot),
                route("GET", "/api/snapshots", self.snapshots),
                route("GET", "/api/snapshots/{name}", self.get_snapshot),
                route("POST", "/api/snapshots/{name}/activate", self.wake_snapshot),
                route("POST", "/api/snapshots/{name}/deactivate", self.put_snapshot_to_sleep),
                route("DELETE", "/api/snapshots/{name}", self.delete_snapshot),
                route("DELETE", f"{tools}/process/pty/{{name}}", self.end_terminal),
                WebSocketRoute(f"{tools}/process/pty/create-connect", self.terminal),
            ]
        )
        both: ASGIApp = socketio.ASGIApp(self._events, rest, socketio_path="/api/socket.io")
        return both

    def authorize(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {KEY}":
            raise Refused(401, "Invalid credentials")

    async def _greeted(self, sid: str, environ: Mapping[str, Any], auth: Mapping[str, str]) -> None:
        if auth.get("token") != KEY:
            raise socketio.exceptions.ConnectionRefusedError("Invalid credentials")

    async def create(self, request: Request) -> Response:
        body = await read(models.CreateSandbox, request)
        refuse_unknown((name for name in body.model_fields_set if getattr(body, name)), KNOWN)
        if body.name in [box.settings.get("name") for box in self.engine.boxes.values()]:
            raise Refused(409, f"Sandbox with name {body.name} already exists")
        if body.user not in (None, *HOMES):
            raise Refused(400, f"user {body.user} is not in the image")
        if max(body.ttl_minutes or 0, body.auto_stop_interval or 0) > LONGEST_LIFE:
            raise Refused(400, f"a sandbox lives for {LONGEST_LIFE} minutes at most")
        image = body.build_info.dockerfile_content.removeprefix("FROM ").strip() if body.build_info else ""
        made_from, sizes = image or body.snapshot or DEFAULT, self._sizes(body)
        box = await self.engine.create(
            self._snapshots.get(made_from, made_from),
            network=not body.network_block_all,
            labels=body.labels or {},
        )
        box.settings = {
            "name": body.name,
            "user": body.user or USER,
            "image": image,
            "snapshot": "" if image else made_from,
            **sizes,
        }
        if body.ttl_minutes:
            self._live(box, body.ttl_minutes, "vanish")
        elif body.auto_stop_interval:
            self._live(box, body.auto_stop_interval, "stop")
        self._pretend(box, image)
        return self._told(box)

    def _sizes(self, body: models.CreateSandbox) -> dict[str, int]:
        asked = {"cpu": body.cpu, "memory": body.memory, "disk": body.disk}
        if body.build_info:
            for name, most in LARGEST.items():
                if (asked[name] or 0) > most:
                    raise Refused(400, f"{name} of {asked[name]} exceeds the maximum of {most} per sandbox")
            return {name: asked[name] or TEMPLATES[DEFAULT][at] for at, name in enumerate(asked)}
        name = body.snapshot or DEFAULT
        if any(asked.values()):
            raise Refused(400, "Cannot specify Sandbox resources when using a snapshot")
        if name in self._asleep:
            raise Refused(400, f"Snapshot {name} is not active")
        if name not in TEMPLATES and self._snapshots.get(name) not in self.engine.snapshots:
            raise Refused(400, f"Snapshot {name} not found")
        return dict(zip(asked, TEMPLATES.get(name, TEMPLATES[DEFAULT]), strict=True))

    def _pretend(self, box: Box, image: str) -> None:
        states = {SLOW: "pending_build", BROKEN: "build_failed", ENDLESS: "creating"}
        if image in states:
            self._pretended[box.id] = states[image]
        if image == SLOW:
            self.engine.begin(self._built(box))

    async def _built(self, box: Box) -> None:
        await asyncio.sleep(0.3)
        before = self._pretended.pop(box.id)
        sandbox = json.loads(self._sandbox(box).to_json())
        news = {"sandbox": sandbox, "oldState": before, "newState": "started"}
        await self._events.emit("sandbox.state.updated", news)

    async def list(self, request: Request) -> Response:
        parameters(request, "labels", "limit", "cursor")
        wanted = json.loads(request.query_params.get("labels", "{}"))
        boxes = [
            box
            for box in self.engine.boxes.values()
            if box.settings and wanted.items() <= dict(box.labels).items()
        ]
        first = int(request.query_params.get("cursor", 0))
        count = int(request.query_params.get("limit", 100))
        common = models.SandboxListItem.model_fields.keys()
        page = models.ListSandboxesResponse(
            items=[
                models.SandboxListItem(
                    **{key: value for key, value in self._fields(box).items() if key in common}
                )
                for box in boxes[first : first + count]
            ],
            next_cursor=str(first + count) if first + count < len(boxes) else None,
        )
        return Response(page.to_json(), media_type="application/json")

    async def get(self, request: Request) -> Response:
        return self._told(self._box(request))

    async def delete(self, request: Request) -> Response:
        box = self._box(request)
        await self.engine.vanish(box)
        return self._told(box)

    async def start(self, request: Request) -> Response:
        box = self._box(request)
        state = self._state(box)
        if state not in ("stopped", "archived"):
            raise Refused(400, f"Sandbox is not in valid state: {state}")
        await self.engine.start(box)
        return self._told(box)

    async def live(self, request: Request) -> Response:
        box = self._box(request)
        self._live(box, request.path_params["minutes"], "vanish")
        return self._told(box)

    async def stop_later(self, request: Request) -> Response:
        box = self._box(request)
        self._live(box, request.path_params["minutes"], "stop")
        return self._told(box)

    async def active(self, request: Request) -> Response:
        box = self._box(request)
        if minutes := box.settings.get("autostop"):
            self._live(box, int(str(minutes)), "stop")
        return Response(status_code=201)

    def _live(self, box: Box, minutes: int, then: str) -> None:
        if minutes > LONGEST_LIFE:
            raise Refused(400, f"a sandbox lives for {LONGEST_LIFE} minutes at most")
        box.on_expiry = then
        if then == "stop":
            box.settings = {**box.settings, "autostop": minutes}
        self.engine.live(box, minutes * 60)

    async def snapshot(self, request: Request) -> Response:
        box, body = self._box(request), await read(models.CreateSandboxSnapshot, request)
        if body.include_memory:
            raise Refused(400, "this server keeps files only")
        if body.name in self._snapshots:
            raise Refused(409, f"Snapshot with name {body.name} already exists")
        self._snapshots[body.name] = await self.engine.snapshot(box)
        return self._told(box)

    async def snapshots(self, request: Request) -> Response:
        parameters(request, "limit")
        found = [
            self._snapshot(name) for name, kept in self._snapshots.items() if kept in self.engine.snapshots
        ]
        page = models.PaginatedSnapshots(items=found, total=len(found), page=1, total_pages=1)
        return Response(page.to_json(), media_type="application/json")

    async def get_snapshot(self, request: Request) -> Response:
        return Response(self._named(request).to_json(), media_type="application/json")

    async def wake_snapshot(self, request: Request) -> Response:
        self._asleep.discard(self._named(request).name)
        return await self.get_snapshot(request)

    async def put_snapshot_to_sleep(self, request: Request) -> Response:
        self._asleep.add(self._named(request).name)
        return Response(status_code=204)

    async def delete_snapshot(self, request: Request) -> Response:
        del self.engine.snapshots[self._snapshots.pop(self._named(request).name)]
        return Response(status_code=200)

    async def terminal(self, socket: WebSocket) -> None:
        box = self.engine.boxes.get(socket.path_params["id"])
        if socket.headers.get("authorization") != f"Bearer {KEY}" or box is None or box.state != "running":
            refusal = Response(self.refusal(404, "no such sandbox"), 404)
            await socket.send_denial_response(refusal)
            return
        query = dict(socket.query_params)
        if query.keys() - {"id", "cols", "rows"}:
            await socket.send_denial_response(Response(self.refusal(400, "an unknown parameter"), 400))
            return
        name, size = query["id"], (int(query["rows"]), int(query["cols"]))
        await socket.accept()
        environment = {"DAYTONA_SANDBOX_ID": box.id, "TERM": "xterm-256color", **_environment(socket)}
        terminal = await Terminal.start(self.engine, box, environment, size=size, user=_user(box))
        self._terminals[box.id, name] = terminal
        terminal.pump.add_done_callback(lambda _: self._terminals.pop((box.id, name), None))
        await socket.send_json({"type": "control", "status": "connected"})
        ways = [
            asyncio.create_task(_typed(socket, terminal)),
            asyncio.create_task(_shown(socket, box, terminal)),
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            terminal.follower = None
            for way in ways:
                way.cancel()
        for way in done:
            way.result()
        if box.state != "running":
            raise server.Cut  # a machine that is gone says no farewell

    async def end_terminal(self, request: Request) -> Response:
        terminal = self._terminals.pop((self._running(request).id, request.path_params["name"]), None)
        if terminal is None:
            raise Refused(404, "PTY session not found")
        terminal.end()
        return JSONResponse({"message": "PTY session deleted"})

    def _box(self, request: Request) -> Box:
        asked = request.path_params["id"]
        for box in self.engine.boxes.values():
            if box.settings and asked in (box.id, box.settings["name"]):
                return box
        raise Refused(404, f"Sandbox with ID or name {asked} not found")

    def _running(self, request: Request) -> Box:
        box = self._box(request)
        if box.state != "running":
            raise Refused(400, "bad request: failed to get runner info: sandbox is not running")
        return box

    def _told(self, box: Box) -> Response:
        return Response(self._sandbox(box).to_json(), media_type="application/json")

    def _sandbox(self, box: Box) -> models.Sandbox:
        return models.Sandbox(**self._fields(box), env={}, kvm=False)

    def _fields(self, box: Box) -> dict[str, Any]:
        state = self._state(box)
        return {
            "id": box.id,
            "organization_id": "loopback",
            "name": box.settings["name"],
            "snapshot": box.settings["snapshot"] or None,
            "user": box.settings["user"],
            "labels": dict(box.labels),
            "target": "loopback",
            "public": False,
            "network_block_all": not box.network,
            "gpu": 0,
            **{name: box.settings[name] for name in LARGEST},
            "state": models.SandboxState(state),
            "error_reason": "the oven is cold" if state in ("error", "build_failed") else None,
            "auto_stop_interval": box.settings.get("autostop", 0),
            "created_at": datetime.fromtimestamp(box.started, UTC).isoformat(),
            "toolbox_proxy_url": f"{self._url}/toolbox",
        }

    def _state(self, box: Box) -> str:
        if box.id not in self.engine.boxes:
            return "destroyed"
        return self._pretended.get(box.id) or STATES.get(box.state, box.state)

    def _named(self, request: Request) -> models.SnapshotDto:
        asked = request.path_params["name"]
        for name, kept in self._snapshots.items():
            if asked in (name, kept) and kept in self.engine.snapshots:
                return self._snapshot(name)
        raise Refused(404, f"Snapshot with ID or name {asked} not found")

    def _snapshot(self, name: str) -> models.SnapshotDto:
        now = datetime.now(UTC)
        cpu, memory, disk = TEMPLATES[DEFAULT]
        return models.SnapshotDto(
            id=self._snapshots[name],
            general=False,
            name=name,
            state=models.SnapshotState("inactive" if name in self._asleep else "active"),
            size=1,
            entrypoint=None,
            cpu=cpu,
            gpu=0,
            mem=memory,
            disk=disk,
            error_reason=None,
            created_at=now,
            updated_at=now,
            last_used_at=None,
            source_sandbox_id=None,
        )


async def _typed(socket: WebSocket, terminal: Terminal) -> None:
    """As long as somebody is connected."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while len(data := await socket.receive_bytes()) <= LONGEST_MESSAGE:
            await terminal.type(data)
        await socket.close(1009, "read limit exceeded")


async def _shown(socket: WebSocket, box: Box, terminal: Terminal) -> None:
    """To its end, of which the client hears the exit status. One that is slow is dropped."""
    waiting = terminal.follow(MOST_MESSAGES)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while data := await waiting.get():
            await socket.send_bytes(data)
        if data is None:
            await socket.close(1008, "slow consumer")
        elif box.state == "running":
            status = await terminal.status()
            await socket.close(1000 if status == 0 else 1011, json.dumps({"exitCode": status}))


def _user(box: Box) -> str:
    return str(box.settings["user"])


def _environment(socket: WebSocket) -> dict[str, str]:
    """Variables come as a name of a protocol."""
    prefix = "X-Daytona-Pty-Envs~"
    for protocol in socket.scope["subprotocols"]:
        if protocol.startswith(prefix):
            encoded = protocol.removeprefix(prefix) + "=="
            found: dict[str, str] = json.loads(base64.urlsafe_b64decode(encoded))
            return found
    return {}


if __name__ == "__main__":
    server.main(Daytona)
