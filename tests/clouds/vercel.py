"""Vercel's wire format: sandboxes by name, their sessions, commands whose output is told from the start.

Fields of requests are those that the SDK's own models have, answers are written with them. What is not known
here is refused. As at Vercel, output is cut anywhere and each piece decoded by itself: characters break.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount
from starlette.types import ASGIApp
from vercel.sandbox._internal import api_client as models
from vercel.sandbox._internal.models import SandboxStatus

from tests.clouds import server
from tests.clouds.commands import Command
from tests.clouds.engine import Box, Engine, NoSuchDirectory, NoSuchProcess
from tests.clouds.rest import Refused, RestProvider, parameters, refuse_unknown

TOKEN, TEAM, PROJECT = "vcp_" + "0" * 40, "team_0", "prj_0"
DEFAULT_IMAGE = "vercel/sandbox/universal"
PENDING, BROKEN = "vercel/never-ready", "vercel/broken"
"""Images whose machines do not come up."""
IMAGES = {DEFAULT_IMAGE, "vercel/sandbox/node:24", "vercel/sandbox/python:3.14", PENDING, BROKEN}
LONGEST_LIFE = 45 * 60_000
MOST_CPUS = 8
MOST_TAGS = 5


@dataclass
class Sandbox:
    """A name, and the session that it has or had last."""

    box: Box
    asked: Mapping[str, Any]
    created: int
    session: str = ""
    began: int = 0
    limit: int = 0
    """Milliseconds from then on."""
    snapshot: str = ""
    commands: dict[str, Command] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.box.id

    @property
    def status(self) -> SandboxStatus:
        if self.box.state != "running":
            return SandboxStatus.STOPPED
        unready = {PENDING: SandboxStatus.PENDING, BROKEN: SandboxStatus.FAILED}
        return unready.get(self.box.made_from, SandboxStatus.RUNNING)


class Vercel(RestProvider):
    name = "vercel"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._sandboxes: dict[str, Sandbox] = {}
        self._snapshots: dict[str, models._SnapshotPayload] = {}
        self._made_of: dict[str, str] = {}
        """Snapshot -> the sandbox's name."""

    def variables(self, url: str) -> Mapping[str, str]:
        return {
            "VERCEL_TOKEN": TOKEN,
            "VERCEL_TEAM_ID": TEAM,
            "VERCEL_PROJECT_ID": PROJECT,
            "VERCEL_SANDBOX_API_URL": f"{url}/api",
        }

    def refusal(self, status: int, message: str) -> bytes:
        return self.told(Refused(status, message, "ordered"))

    def told(self, refused: Refused) -> bytes:
        error = {"code": refused.code or "bad_request", "message": str(refused)}
        return json.dumps({"error": error}).encode()

    def application(self) -> ASGIApp:
        session = "/v2/sandboxes/sessions/{session}"
        command = session + "/cmd/{command}"
        routes = [
            ("POST", "/v3/sandboxes", self.create),
            ("GET", "/v2/sandboxes", self.list),
            ("POST", session + "/extend-timeout", self.extend),
            ("POST", session + "/snapshot", self.make_snapshot),
            ("POST", session + "/cmd", self.start),
            ("GET", command, self.get_command),
            ("GET", command + "/logs", self.logs),
            ("POST", command + "/stdin", self.type),
            ("POST", command + "/kill", self.kill),
            ("GET", "/v2/sandboxes/snapshots", self.list_snapshots),
            ("GET", "/v2/sandboxes/snapshots/{snapshot}", self.get_snapshot),
            ("DELETE", "/v2/sandboxes/snapshots/{snapshot}", self.delete_snapshot),
            ("GET", "/v2/sandboxes/{name}", self.get),
            ("PATCH", "/v2/sandboxes/{name}", self.update),
            ("DELETE", "/v2/sandboxes/{name}", self.delete),
        ]
        known = [self.route(*each) for each in routes]
        return Starlette(routes=[Mount("/api", routes=known)])

    def authorize(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            raise Refused(403, "Not authorized", "forbidden")
        if request.query_params.get("teamId") != TEAM:
            raise Refused(403, "Not authorized: no such team", "forbidden")

    async def create(self, request: Request) -> Response:
        asked = await _read(models._CreateSandboxRequest, request)
        _expect(asked, projectId=PROJECT)
        unknown = {"ports", "networkId", "env", "mounts", "keepLastSnapshots", "region", "failoverRegions"}
        refuse_unknown(asked.keys() & unknown)
        name = asked.get("name", f"box-{secrets.token_hex(6)}")
        if self._known(name):
            raise Refused(409, f"A sandbox named '{name}' already exists.", "conflict")
        made_from = self._source(asked)
        _check(asked)
        box = await self.engine.create(
            made_from,
            network=asked.get("networkPolicy", {}).get("mode") != "deny-all",
            labels=asked.get("tags", {}),
            id=name,
        )
        sandbox = self._sandboxes[name] = Sandbox(box, asked, _now())
        self._began(sandbox)
        return self._told(sandbox)

    def _source(self, asked: Mapping[str, Any]) -> str:
        source, image = asked.get("source"), asked.get("image")
        if source is None:
            image = image or DEFAULT_IMAGE
            if image.removesuffix(":latest") not in IMAGES:
                raise Refused(404, f"Image '{image}' was not found.", "image_not_found")
            return str(image.removesuffix(":latest"))
        if image or source.get("type") != "snapshot":
            raise Refused(400, "this server takes an image or a snapshot")
        if source["snapshotId"] not in self.engine.snapshots:
            raise Refused(410, "Snapshot not found.", "snapshot_not_found")
        return str(source["snapshotId"])

    def _began(self, sandbox: Sandbox) -> None:
        """A new session."""
        sandbox.session = f"sbx_{secrets.token_hex(14)}"
        sandbox.began, sandbox.limit = _now(), int(sandbox.asked.get("timeout", 300_000))
        sandbox.commands = {}
        box = sandbox.box
        box.on_expiry = "stop"
        box.settings = {
            key: sandbox.asked.get(key) for key in ("resources", "persistent", "image", "snapshotExpiration")
        }
        self.engine.live(box, sandbox.limit / 1000)

    async def list(self, request: Request) -> Response:
        _known_parameters(request, {"project", "limit", "cursor", "sortBy", "sortOrder", "tags"})
        key, _, value = request.query_params.get("tags", "").partition(":")
        found = [
            await self._observed(name)
            for name in list(self._sandboxes)
            if self._known(name) and (not key or self._sandboxes[name].box.labels.get(key) == value)
        ]
        first, count = (
            int(request.query_params.get("cursor", 0)),
            int(request.query_params.get("limit", 2)),
        )
        more = str(first + count) if first + count < len(found) else None
        page = [_sandbox_payload(each) for each in found[first : first + count]]
        pagination = models._Pagination(count=len(page), next=more)
        return _told(models._SandboxesResponse(sandboxes=page, pagination=pagination))

    async def get(self, request: Request) -> Response:
        _known_parameters(request, {"projectId", "resume"})
        sandbox = await self._observed(request.path_params["name"])
        if request.query_params.get("resume") == "true" and sandbox.box.state != "running":
            await self._resume(sandbox)
        return self._told(sandbox)

    async def _resume(self, sandbox: Sandbox) -> None:
        if sandbox.snapshot not in self.engine.snapshots:
            status = 410 if sandbox.snapshot else 400
            raise Refused(status, "Cannot resume sandbox: no snapshot available.", "snapshot_not_found")
        old = sandbox.box
        await self.engine.vanish(old)
        sandbox.box = await self.engine.create(
            sandbox.snapshot, network=old.network, labels=old.labels, id=old.id
        )
        self._began(sandbox)

    async def delete(self, request: Request) -> Response:
        _known_parameters(request, {"projectId", "deleteOrphanSnapshots"})
        sandbox = await self._observed(request.path_params["name"])
        if sandbox.box.state == "running":
            await self.engine.stop(sandbox.box)
            await self._observed(sandbox.name)
        told = self._told(sandbox)
        await self.engine.vanish(sandbox.box)
        return told

    async def update(self, request: Request) -> Response:
        _known_parameters(request, {"projectId"})
        sandbox = await self._observed(request.path_params["name"])
        asked = await _read(models._UpdateSandboxRequest, request)
        if unknown := asked.keys() - {"persistent"}:
            raise Refused(400, f"this server does not change {', '.join(unknown)}")
        sandbox.asked = {**sandbox.asked, **asked}
        return self._told(sandbox)

    async def extend(self, request: Request) -> Response:
        sandbox = self._session(request)
        asked = await _read(models._ExtendTimeoutRequest, request)
        if asked["duration"] < 1000:
            raise Refused(400, "`duration` must be at least 1000 ms")
        if sandbox.limit + asked["duration"] > LONGEST_LIFE:
            raise Refused(400, "timeout restricted to <= 45m")
        sandbox.limit += asked["duration"]
        self.engine.live(sandbox.box, (sandbox.began + sandbox.limit - _now()) / 1000)
        return _told(models._RuntimeSessionResponse(session=_session_payload(sandbox)))

    async def make_snapshot(self, request: Request) -> Response:
        sandbox = self._session(request)
        asked = await _read(models._CreateSnapshotRequest, request)
        if 0 < asked.get("expiration", 0) < 86_400_000:
            raise Refused(400, "`expiration` must be 0 (no expiration) or >= 86400000 ms")
        await self.engine.stop(sandbox.box)
        snapshot = await self._save(sandbox, asked.get("expiration", 30 * 86_400_000), "manual")
        answer = models._CreateSnapshotResponse(snapshot=snapshot, session=_session_payload(sandbox))
        return _told(answer, 201)

    async def _save(self, sandbox: Sandbox, expiration: int, method: str) -> models._SnapshotPayload:
        id = sandbox.snapshot = await self.engine.snapshot(sandbox.box)
        self._made_of[id] = sandbox.name
        self._snapshots[id] = models._SnapshotPayload(
            id=id,
            source_session_id=sandbox.session,
            region="iad1",
            status="created",
            size_bytes=1,
            expires_at=_now() + expiration if expiration else None,
            created_at=_now(),
            updated_at=_now(),
            creation_method=method,
        )
        return self._snapshots[id]

    async def list_snapshots(self, request: Request) -> Response:
        _known_parameters(request, {"project", "name"})
        found = [
            snapshot
            for id, snapshot in self._snapshots.items()
            if id in self.engine.snapshots and self._made_of[id] == request.query_params.get("name")
        ]
        return _told(models._SnapshotsResponse(snapshots=found))

    async def get_snapshot(self, request: Request) -> Response:
        return _told(models._SnapshotResponse(snapshot=self._snapshot(request)))

    async def delete_snapshot(self, request: Request) -> Response:
        snapshot = self._snapshot(request)
        del self.engine.snapshots[snapshot.id]
        return _told(models._SnapshotResponse(snapshot=snapshot.model_copy(update={"status": "deleted"})))

    def _snapshot(self, request: Request) -> models._SnapshotPayload:
        id = request.path_params["snapshot"]
        if id not in self.engine.snapshots:
            raise Refused(404, "Snapshot not found.", "not_found")
        return self._snapshots[id]

    async def start(self, request: Request) -> Response:
        sandbox = self._session(request)
        asked = await _read(models._RunCommandRequest, request)
        words = [asked["command"], *asked.get("args", [])]
        try:
            program = await self.engine.spawn(
                sandbox.box,
                words,
                env=asked.get("env", {}),
                cwd=asked.get("cwd", ""),
                user="root" if asked.get("sudo") else "user",
                stdin=asked.get("attachStdin", False),
            )
        except NoSuchDirectory as missing:
            raise Refused(400, f"no such directory: {missing}") from None
        command = Command(f"cmd_{secrets.token_hex(14)}", words, sandbox.session, program, _now())
        command.task = asyncio.create_task(command.follow())
        sandbox.commands[command.id] = command
        if asked.get("wait") and asked.get("logs"):
            return StreamingResponse(self._whole(sandbox, command), media_type="application/x-ndjson")
        return _told(models._CommandResponse(command=command.payload()))

    async def _whole(self, sandbox: Sandbox, command: Command) -> AsyncIterator[bytes]:
        """Its beginning, what it says, and its end."""
        yield _line(models._CommandResponse(command=command.payload()))
        async for record in self._log(sandbox, command):
            yield record
        yield _line(models._CommandResponse(command=command.payload()))

    async def get_command(self, request: Request) -> Response:
        command = self._command(request)
        if request.query_params.get("wait") == "true":
            await command.ended()
        return _told(models._CommandResponse(command=command.payload()))

    async def logs(self, request: Request) -> Response:
        sandbox, command = self._session(request), self._command(request)
        return StreamingResponse(self._log(sandbox, command), media_type="application/x-ndjson")

    async def _log(self, sandbox: Sandbox, command: Command) -> AsyncIterator[bytes]:
        async for record in command.log():
            yield record
        if sandbox.box.state != "running":
            stopped = {"code": "sandbox_stopped", "message": "Sandbox has stopped execution"}
            yield json.dumps({"stream": "error", "data": stopped}).encode() + b"\n"

    async def type(self, request: Request) -> Response:
        command = self._command(request)
        asked = await request.json()
        refuse_unknown(asked, {"data", "offset", "close"})
        try:
            await command.type(base64.b64decode(asked.get("data", "")), asked.get("offset"))
        except NoSuchProcess:
            raise Refused(400, "its stdin is closed", "command_stdin_unavailable") from None
        if asked.get("close"):
            command.program.close_stdin()
        return _told(models._CommandStdinResponse(command=command.payload(), bytes_written=command.typed))

    async def kill(self, request: Request) -> Response:
        command, asked = self._command(request), await request.json()
        _expect(asked, signal=asked.get("signal"))
        command.program.signal(asked["signal"])
        return _told(models._CommandResponse(command=command.payload()))

    def _known(self, name: str) -> bool:
        return name in self._sandboxes and self.engine.boxes.get(name) is self._sandboxes[name].box

    async def _observed(self, name: str) -> Sandbox:
        """As it is now: a persistent one that stopped was saved."""
        if not self._known(name):
            raise Refused(404, f"Named sandbox '{name}' not found for this project.", "not_found")
        sandbox = self._sandboxes[name]
        saved = self._snapshots.get(sandbox.snapshot)
        unsaved = saved is None or saved.source_session_id != sandbox.session
        if sandbox.box.state != "running" and sandbox.asked.get("persistent") and unsaved:
            await self._save(sandbox, sandbox.asked.get("snapshotExpiration", 0), "automatic")
        return sandbox

    def _session(self, request: Request) -> Sandbox:
        for name, sandbox in self._sandboxes.items():
            if sandbox.session == request.path_params["session"] and self._known(name):
                if sandbox.box.state == "running":
                    return sandbox
                break
        raise Refused(410, "Sandbox has stopped execution and is no longer available", "sandbox_stopped")

    def _command(self, request: Request) -> Command:
        commands = self._session(request).commands
        if request.path_params["command"] not in commands:
            raise Refused(404, "Command not found.", "not_found")
        return commands[request.path_params["command"]]

    def _told(self, sandbox: Sandbox) -> Response:
        answer = models._SandboxResponse(
            sandbox=_sandbox_payload(sandbox), session=_session_payload(sandbox), routes=[]
        )
        return _told(answer)


def _sandbox_payload(sandbox: Sandbox) -> models._SandboxPayload:
    asked = sandbox.asked
    return models._SandboxPayload(
        name=sandbox.name,
        current_session_id=sandbox.session,
        image=None if sandbox.box.made_from.startswith("snap") else sandbox.box.made_from,
        status=sandbox.status,
        persistent=bool(asked.get("persistent")),
        current_snapshot_id=sandbox.snapshot or None,
        project_id=PROJECT,
        execution_time_limit=int(asked.get("timeout", 300_000)),
        created_at=sandbox.created,
        updated_at=_now(),
        tags=dict(sandbox.box.labels),
        **_resources(asked),
    )


def _session_payload(sandbox: Sandbox) -> models._RuntimeSessionPayload:
    return models._RuntimeSessionPayload(
        id=sandbox.session,
        sandbox_name=sandbox.name,
        project_id=PROJECT,
        status=sandbox.status,
        cwd="/",
        execution_time_limit=sandbox.limit,
        requested_at=sandbox.began,
        started_at=sandbox.began,
        **_resources(sandbox.asked),
    )


def _resources(asked: Mapping[str, Any]) -> dict[str, Any]:
    """This plan gives no more than 4."""
    vcpus = min(asked.get("resources", {}).get("vcpus", 2), 4)
    return {"vcpus": vcpus, "memory": vcpus * 2048}


def _check(asked: Mapping[str, Any]) -> None:
    resources = asked.get("resources", {})
    vcpus = resources.get("vcpus", 2)
    if vcpus > MOST_CPUS or (vcpus != 1 and vcpus % 2):
        raise Refused(400, f"Invalid vcpus: {vcpus}")
    if resources.get("memory", vcpus * 2048) != vcpus * 2048:
        raise Refused(400, "memory must be 2048 MB per vCPU")
    if asked.get("timeout", 0) > LONGEST_LIFE:
        raise Refused(400, "timeout restricted to <= 45m")
    if len(asked.get("tags", {})) > MOST_TAGS:
        raise Refused(400, f"at most {MOST_TAGS} tags")


async def _read(model: type[BaseModel], request: Request) -> dict[str, Any]:
    """The body, which has nothing but the model's fields as they are called on the wire."""
    body: dict[str, Any] = json.loads(await request.body() or b"{}")
    refuse_unknown(body, {each.serialization_alias or name for name, each in model.model_fields.items()})
    return body


def _expect(asked: Mapping[str, Any], **values: object) -> None:
    for key, value in values.items():
        if asked.get(key) != value:
            raise Refused(403, f"not authorized: {key}", "forbidden")


def _known_parameters(request: Request, known: set[str]) -> None:
    parameters(request, "teamId", *known)
    for name in {"project", "projectId"} & known:
        if request.query_params.get(name, PROJECT) != PROJECT:
            raise Refused(403, "not authorized: no such project", "forbidden")


def _told(answer: BaseModel, status: int = 200) -> Response:
    return JSONResponse(answer.model_dump(by_alias=True, exclude_none=True, mode="json"), status)


def _line(answer: BaseModel) -> bytes:
    return answer.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n"


def _now() -> int:
    return int(time.time() * 1000)


if __name__ == "__main__":
    server.main(Vercel)
