"""E2B's wire format: its REST interface and envd's RPC on one port, told apart by the path.

Requests are read, and answers written, with the SDK's own models and protos. What is not known here is
refused.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, unquote

from connectrpc.code import Code
from connectrpc.codec import proto_json_codec
from connectrpc.errors import ConnectError
from connectrpc.request import RequestContext
from e2b.api.client import models
from e2b.envd.process import process_connect, process_pb
from protobuf import Oneof
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from tests.clouds import server
from tests.clouds.engine import HOMES, Box, Engine, NoSuchDirectory, NoSuchProcess, Program
from tests.clouds.rest import Refused, RestProvider, parameters, read, refuse_unknown

KEY = "e2b_" + "0" * 40
TEMPLATES = {"base": (2, 512), "large": (8, 8192)}
"""Name -> CPUs, MiB."""
LONGEST_LIFE = 3600
ENVD_VERSION = "0.6.4"


class E2B(RestProvider):
    name = "e2b"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._made: dict[str, str] = {}
        """Idempotency key -> the sandbox that was made for it."""

    def variables(self, url: str) -> Mapping[str, str]:
        return {"E2B_API_KEY": KEY, "E2B_API_URL": url, "E2B_SANDBOX_URL": url}

    def refusal(self, status: int, message: str) -> bytes:
        return json.dumps(models.Error(code=status, message=message).to_dict()).encode()

    def application(self) -> ASGIApp:
        processes = process_connect.ProcessASGIApplication(
            Processes(self.engine), codecs=[proto_json_codec()], read_max_bytes=None
        )
        return Starlette(
            routes=[
                self.route("POST", "/v2/sandboxes", self.create),
                self.route("GET", "/v2/sandboxes", self.list),
                self.route("POST", "/v2/sandboxes/{id}/connect", self.connect),
                self.route("GET", "/sandboxes/{id}", self.get),
                self.route("DELETE", "/sandboxes/{id}", self.kill),
                self.route("POST", "/sandboxes/{id}/timeout", self.timeout),
                self.route("POST", "/sandboxes/{id}/snapshots", self.snapshot),
                self.route("GET", "/snapshots", self.snapshots),
                self.route("DELETE", "/templates/{id}", self.delete_snapshot),
                Route("/health", self.health, methods=["GET"]),
                Mount("/", processes),
            ]
        )

    def authorize(self, request: Request) -> None:
        if request.headers.get("x-api-key") != KEY:
            raise Refused(401, "Invalid API key")

    async def create(self, request: Request) -> Response:
        body = await read(models.NewSandboxV2, request)
        unknown = ("network", "mcp", "iam", "volume_mounts", "auto_resume")
        refuse_unknown(name for name in unknown if getattr(body, name))
        template = body.template_id.partition(":")[0]
        if template not in TEMPLATES and template not in self.engine.snapshots:
            raise Refused(404, f"template '{body.template_id}' not found")
        _check_life(body.timeout or 300)
        key = request.headers.get("idempotency-key", secrets.token_hex())
        if key not in self._made:
            box = await self.engine.create(
                template, network=body.allow_internet_access is not False, labels=body.metadata or {}
            )
            box.on_expiry = "pause" if body.auto_pause is True else "vanish"
            self._live(box, body.timeout or 300)
            self._made[key] = box.id
        return JSONResponse(_sandbox(self._box(self._made[key])).to_dict(), 201)

    async def list(self, request: Request) -> Response:
        parameters(request, "metadata", "state", "limit", "nextToken", "order")
        pairs = parse_qsl(request.query_params.get("metadata", ""))
        wanted = {unquote(name): unquote(value) for name, value in pairs}
        boxes = [box for box in self.engine.boxes.values() if wanted.items() <= dict(box.labels).items()]
        first, count = (
            int(request.query_params.get("nextToken", 0)),
            int(request.query_params.get("limit", 100)),
        )
        more = {"x-next-token": str(first + count)} if first + count < len(boxes) else {}
        page = [_listed(box).to_dict() for box in boxes[first : first + count]]
        return JSONResponse(page, headers=more)

    async def get(self, request: Request) -> Response:
        return JSONResponse(_detail(self._box(request.path_params["id"])).to_dict())

    async def connect(self, request: Request) -> Response:
        body = await read(models.ConnectSandboxV2, request)
        box = self._box(request.path_params["id"])
        resumed = box.state != "running"
        if resumed:
            await self.engine.start(box)
        self._live(box, body.timeout or 300)
        return JSONResponse(_sandbox(box).to_dict(), 201 if resumed else 200)

    async def kill(self, request: Request) -> Response:
        await self.engine.vanish(self._box(request.path_params["id"]))
        return Response(status_code=204)

    async def timeout(self, request: Request) -> Response:
        body = await read(models.SandboxTimeoutRequest, request)
        self._live(self._box(request.path_params["id"]), body.timeout)
        return Response(status_code=204)

    async def snapshot(self, request: Request) -> Response:
        body = await read(models.SandboxSnapshotRequest, request)
        if body.memory is not False:
            raise Refused(400, "this server keeps files only")
        id = await self.engine.snapshot(self._box(request.path_params["id"]))
        return JSONResponse(_snapshot(id).to_dict(), 201)

    async def snapshots(self, request: Request) -> Response:
        parameters(request, "name", "limit")
        found = map(_snapshot, self.engine.snapshots)
        name = request.query_params.get("name", "")
        return JSONResponse([each.to_dict() for each in found if name in ("", each.snapshot_id)])

    async def delete_snapshot(self, request: Request) -> Response:
        if self.engine.snapshots.pop(request.path_params["id"].partition(":")[0], None) is None:
            raise Refused(404, "template not found")
        return Response(status_code=204)

    async def health(self, request: Request) -> Response:
        box = self.engine.boxes.get(request.headers.get("e2b-sandbox-id", ""))
        return Response(status_code=204) if box and box.state == "running" else _gone()

    def _box(self, id: str) -> Box:
        if id not in self.engine.boxes:
            raise Refused(404, f"Sandbox \"{id}\" doesn't exist or you don't have access to it")
        return self.engine.boxes[id]

    def _live(self, box: Box, seconds: float) -> None:
        _check_life(seconds)
        self.engine.live(box, seconds)


def _check_life(seconds: float) -> None:
    if seconds > LONGEST_LIFE:
        raise Refused(400, f"Timeout cannot be greater than {LONGEST_LIFE // 3600} hours")


class Processes(process_connect.Process):
    """envd's process service, of whatever sandbox the headers name."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(
        self, request: process_pb.StartRequest, ctx: RequestContext[Any, Any]
    ) -> AsyncIterator[process_pb.StartResponse]:
        box, config = self._box(ctx), request.process
        if config is None or request.has_field("pty") or request.has_field("tag"):
            raise ConnectError(Code.INVALID_ARGUMENT, "this server starts plain processes only")
        try:
            program = await self._engine.spawn(
                box,
                [config.cmd, *config.args],
                env={"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": box.id, **config.envs},
                cwd=config.cwd,
                user=_user(ctx),
                stdin=request.stdin,
            )
        except NoSuchDirectory as missing:
            raise ConnectError(Code.INVALID_ARGUMENT, f"cwd '{missing}' does not exist") from None
        async for event in _events(box, program):
            yield process_pb.StartResponse(event=event)

    async def connect(
        self, request: process_pb.ConnectRequest, ctx: RequestContext[Any, Any]
    ) -> AsyncIterator[process_pb.ConnectResponse]:
        async for event in _events(self._box(ctx), self._program(request.process, ctx)):
            yield process_pb.ConnectResponse(event=event)

    async def send_input(
        self, request: process_pb.SendInputRequest, ctx: RequestContext[Any, Any]
    ) -> process_pb.SendInputResponse:
        await _type(self._program(request.process, ctx), request.input)
        return process_pb.SendInputResponse()

    async def stream_input(
        self, request: AsyncIterator[process_pb.StreamInputRequest], ctx: RequestContext[Any, Any]
    ) -> process_pb.StreamInputResponse:
        program: Program | None = None
        async for each in request:
            match each.event:
                case Oneof(value=process_pb.StreamInputRequest.StartEvent() as start):
                    program = self._program(start.process, ctx)
                case Oneof(value=process_pb.StreamInputRequest.DataEvent() as data) if program is not None:
                    await _type(program, data.input)
        return process_pb.StreamInputResponse()

    async def close_stdin(
        self, request: process_pb.CloseStdinRequest, ctx: RequestContext[Any, Any]
    ) -> process_pb.CloseStdinResponse:
        self._program(request.process, ctx).close_stdin()
        return process_pb.CloseStdinResponse()

    async def send_signal(
        self, request: process_pb.SendSignalRequest, ctx: RequestContext[Any, Any]
    ) -> process_pb.SendSignalResponse:
        self._program(request.process, ctx).signal(int(request.signal))
        return process_pb.SendSignalResponse()

    async def list(
        self, request: process_pb.ListRequest, ctx: RequestContext[Any, Any]
    ) -> process_pb.ListResponse:
        raise ConnectError(Code.UNIMPLEMENTED, "this server does not know List")

    async def update(
        self, request: process_pb.UpdateRequest, ctx: RequestContext[Any, Any]
    ) -> process_pb.UpdateResponse:
        raise ConnectError(Code.UNIMPLEMENTED, "this server does not know Update")

    def _box(self, ctx: RequestContext[Any, Any]) -> Box:
        headers = ctx.request_headers
        box = self._engine.boxes.get(headers.get("e2b-sandbox-id", ""))
        if box is None or box.state != "running":
            raise ConnectError(Code.UNAVAILABLE, "The sandbox was not found")
        if headers.get("x-access-token") != _token(box):
            raise ConnectError(Code.UNAUTHENTICATED, "Invalid access token")
        return box

    def _program(self, selector: process_pb.ProcessSelector | None, ctx: RequestContext[Any, Any]) -> Program:
        box = self._box(ctx)
        match selector.selector if selector is not None else None:
            case Oneof(field="pid", value=int(pid)) if pid in box.programs:
                return box.programs[pid]
            case chosen:
                raise ConnectError(Code.NOT_FOUND, f"process with {chosen} not found")


async def _events(box: Box, program: Program) -> AsyncIterator[process_pb.ProcessEvent]:
    event = process_pb.ProcessEvent
    yield _event("start", event.StartEvent(pid=program.pid))
    async for name, data in program.output():
        output: Any = Oneof(name, data)
        yield _event("data", event.DataEvent(output=output))
    if box.state != "running":
        raise ConnectError(Code.UNAVAILABLE, f"the connection to sandbox {box.id} ended before its stream")
    code = program.status
    status = f"exit status {code}" if code >= 0 else f"signal: {-code}"
    yield _event("end", event.EndEvent(exit_code=code, exited=code >= 0, status=status))


def _event(name: str, value: Any) -> process_pb.ProcessEvent:
    event: Any = Oneof(name, value)
    return process_pb.ProcessEvent(event=event)


async def _type(program: Program, given: process_pb.ProcessInput | None) -> None:
    match given.input if given is not None else None:
        case Oneof(field="stdin", value=bytes(data)):
            try:
                await program.write(data)
            except NoSuchProcess:
                raise ConnectError(Code.NOT_FOUND, "its stdin is closed") from None
        case other:
            raise ConnectError(Code.INVALID_ARGUMENT, f"this server does not know the input {other}")


def _user(ctx: RequestContext[Any, Any]) -> str:
    words = ctx.request_headers.get("authorization", "").split()
    user = base64.b64decode(words[1]).decode().partition(":")[0] if words else "user"
    if user not in HOMES:
        raise ConnectError(Code.UNAUTHENTICATED, f"invalid username: '{user}'")
    return user


def _gone() -> Response:
    return JSONResponse({"message": "The sandbox was not found", "code": 502}, 502)


def _token(box: Box) -> str:
    return f"token-of-{box.id}"


def _sandbox(box: Box) -> models.Sandbox:
    return models.Sandbox(
        template_id=box.made_from,
        sandbox_id=box.id,
        client_id="loopback",
        envd_version=ENVD_VERSION,
        envd_access_token=_token(box),
    )


def _common(box: Box) -> dict[str, Any]:
    cpus, memory = TEMPLATES.get(box.made_from, TEMPLATES["base"])
    return {
        "template_id": box.made_from,
        "sandbox_id": box.id,
        "client_id": "loopback",
        "started_at": datetime.fromtimestamp(box.started, UTC),
        "end_at": datetime.fromtimestamp(box.expires, UTC),
        "cpu_count": cpus,
        "memory_mb": memory,
        "disk_size_mb": 10240,
        "state": models.SandboxState("running" if box.state == "running" else "paused"),
        "envd_version": ENVD_VERSION,
        "metadata": dict(box.labels),
    }


def _snapshot(id: str) -> models.SnapshotInfo:
    return models.SnapshotInfo(snapshot_id=f"{id}:default", names=[])


def _listed(box: Box) -> models.ListedSandbox:
    return models.ListedSandbox(**_common(box))


def _detail(box: Box) -> models.SandboxDetail:
    return models.SandboxDetail(**_common(box), envd_access_token=_token(box))


if __name__ == "__main__":
    server.main(E2B)
