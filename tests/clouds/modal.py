"""Modal's wire format: its control plane and the router of a sandbox's commands, on one gRPC port.

Both are served, message by message, by the SDK's own definitions. What is not known here is refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpclib.server
from google.protobuf import empty_pb2
from grpclib import Status
from modal._utils.grpc_utils import custom_detail_codec
from modal_proto import api_pb2
from modal_proto import task_command_router_pb2 as router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase
from starlette.applications import Starlette
from starlette.types import ASGIApp

from tests.clouds import server
from tests.clouds.engine import Box, Engine, NoSuchProcess
from tests.clouds.grpc import Refused, Service, known
from tests.clouds.replay import Exec, Misplaced

TOKEN_ID, TOKEN_SECRET = "ak-" + "0" * 22, "as-" + "0" * 22
LONGEST_LIFE = 24 * 3600
BUILDER = "2025.06"
UNKNOWN_IMAGE = "no-such"
"""A name that no registry has."""

_TAG = re.compile(r"[A-Za-z0-9._-]{1,63}")

Metadata = Mapping[str, Any]
Result = api_pb2.GenericResult


@dataclass
class Sandbox:
    """What Modal knows of one."""

    box: Box
    app: str
    idle: float
    over: float
    execs: dict[str, Exec] = field(default_factory=dict)
    terminated: bool = False

    @property
    def task(self) -> str:
        return f"ta-{self.box.id.removeprefix('sb-')}V"

    @property
    def running(self) -> bool:
        return self.box.state == "running"

    @property
    def busy(self) -> bool:
        return not all(each.program.ended.is_set() for each in self.execs.values())

    @property
    def result(self) -> api_pb2.GenericResult:
        if self.running:
            return Result()
        if self.terminated or self.box.state == "stopped":
            return Result(status=Result.GENERIC_STATUS_TERMINATED)
        idle = time.time() < self.over and not self.busy
        return Result(status=Result.GENERIC_STATUS_IDLE_TIMEOUT if idle else Result.GENERIC_STATUS_TIMEOUT)


class Modal(server.Provider):
    name = "modal"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.url = ""
        self.apps: set[str] = set()
        self.images: set[str] = set()
        self.sandboxes: dict[str, Sandbox] = {}

    def application(self) -> ASGIApp:
        return Starlette()

    async def listen(self, server: server.Server) -> None:
        answers = [(ModalClientBase, Control(self)), (TaskCommandRouterBase, Router(self))]
        services = [Service(definition, each, server) for definition, each in answers]
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        await grpclib.server.Server(services, status_details_codec=custom_detail_codec).start(sock=listener)

    def variables(self, url: str) -> Mapping[str, str]:
        return {
            "MODAL_SERVER_URL": self.url,
            "MODAL_TOKEN_ID": TOKEN_ID,
            "MODAL_TOKEN_SECRET": TOKEN_SECRET,
        }

    def sandbox(self, id: str) -> Sandbox:
        found = self.sandboxes.get(id)
        # One that a test made vanish before its time was never here.
        if found is None or (
            found.box.state == "gone" and not found.terminated and time.time() < found.box.expires
        ):
            raise Refused(Status.NOT_FOUND, f"Sandbox with id {id} not found")
        return found

    def used(self, sandbox: Sandbox) -> None:
        """It lives until its end while anything runs in it, else until it was idle for too long."""
        if sandbox.running:
            seconds = sandbox.over - time.time()
            self.engine.live(sandbox.box, seconds if sandbox.busy else min(seconds, sandbox.idle))


class Control:
    """The control plane."""

    def __init__(self, modal: Modal) -> None:
        self._modal = modal
        self._engine = modal.engine
        self._made: dict[str, str] = {}
        """Idempotency key -> the sandbox that was made for it."""

    async def ClientHello(self, message: empty_pb2.Empty, metadata: Metadata) -> api_pb2.ClientHelloResponse:
        _authenticate(metadata)
        return api_pb2.ClientHelloResponse()

    async def AuthTokenGet(
        self, message: api_pb2.AuthTokenGetRequest, metadata: Metadata
    ) -> api_pb2.AuthTokenGetResponse:
        _authenticate(metadata)
        return api_pb2.AuthTokenGetResponse(token=_jwt("workspace"))

    async def EnvironmentGetOrCreate(
        self, message: api_pb2.EnvironmentGetOrCreateRequest, metadata: Metadata
    ) -> api_pb2.EnvironmentGetOrCreateResponse:
        _authenticate(metadata)
        known(message)
        settings = api_pb2.EnvironmentSettings(image_builder_version=BUILDER)
        told = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=told)

    async def AppGetOrCreate(
        self, message: api_pb2.AppGetOrCreateRequest, metadata: Metadata
    ) -> api_pb2.AppGetOrCreateResponse:
        _authenticate(metadata)
        known(message, "app_name", "object_creation_type")
        app = f"ap-{message.app_name}"
        if message.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            self._modal.apps.add(app)
        if app not in self._modal.apps:
            raise Refused(Status.NOT_FOUND, f"App '{message.app_name}' not found in environment 'main'")
        return api_pb2.AppGetOrCreateResponse(app_id=app)

    async def ImageGetOrCreate(
        self, message: api_pb2.ImageGetOrCreateRequest, metadata: Metadata
    ) -> api_pb2.ImageGetOrCreateResponse:
        _authenticate(metadata)
        known(message, "app_id", "image.dockerfile_commands", "builder_version", "namespace")
        first = message.image.dockerfile_commands[0]
        if not first.startswith("FROM "):
            raise Refused(Status.INVALID_ARGUMENT, f"this server does not know {first}")
        id = "im-" + base64.b32encode(first.encode()).decode().rstrip("=")
        if UNKNOWN_IMAGE in first:
            failed = Result(status=Result.GENERIC_STATUS_FAILURE, exception=f"manifest unknown: {first}")
            return api_pb2.ImageGetOrCreateResponse(image_id=id, result=failed)
        self._modal.images.add(id)
        return api_pb2.ImageGetOrCreateResponse(
            image_id=id, result=Result(status=Result.GENERIC_STATUS_SUCCESS)
        )

    async def ImageFromId(
        self, message: api_pb2.ImageFromIdRequest, metadata: Metadata
    ) -> api_pb2.ImageFromIdResponse:
        _authenticate(metadata)
        self._image(message.image_id)
        return api_pb2.ImageFromIdResponse(image_id=message.image_id)

    async def ImageDelete(self, message: api_pb2.ImageDeleteRequest, metadata: Metadata) -> empty_pb2.Empty:
        _authenticate(metadata)
        del self._engine.snapshots[self._image(message.image_id)]
        return empty_pb2.Empty()

    async def SandboxCreateV2(
        self, message: api_pb2.SandboxCreateV2Request, metadata: Metadata
    ) -> api_pb2.SandboxCreateV2Response:
        _authenticate(metadata, token=True)
        _check_definition(message)
        image = self._image(message.definition.image_id)
        if message.app_id not in self._modal.apps:
            raise Refused(Status.NOT_FOUND, f"App {message.app_id} not found")
        key = str(metadata["x-idempotency-key"])
        if key not in self._made:
            self._made[key] = await self._make(message, image)
        made = self._modal.sandbox(self._made[key])
        access = api_pb2.CommandRouterAccess(jwt=_jwt(made.task), url=self._modal.url)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=made.box.id, task_id=made.task, command_router_access=access
        )

    async def _make(self, message: api_pb2.SandboxCreateV2Request, image: str) -> str:
        definition = message.definition
        access = definition.network_access.network_access_type
        box = await self._engine.create(
            image,
            network=access != api_pb2.NetworkAccess.NetworkAccessType.BLOCKED,
            labels={tag.tag_name: tag.tag_value for tag in message.tags},
            id=f"sb-{secrets.token_hex(8)}",
        )
        box.settings = {
            "image": image,
            "milli_cpu": definition.resources.milli_cpu_max,
            "memory": definition.resources.memory_mb_max,
            "regions": list(definition.scheduler_placement.regions),
            "idle": definition.idle_timeout_secs,
        }
        over = time.time() + definition.timeout_secs
        made = Sandbox(box, message.app_id, definition.idle_timeout_secs, over)
        self._modal.sandboxes[box.id] = made
        self._modal.used(made)
        return box.id

    async def SandboxWaitV2(
        self, message: api_pb2.SandboxWaitRequest, metadata: Metadata
    ) -> api_pb2.SandboxWaitResponse:
        _authenticate(metadata, token=True)
        sandbox = self._modal.sandbox(message.sandbox_id)
        machine = sandbox.box.machine
        if machine is not None and message.timeout:
            try:
                await asyncio.wait_for(machine.wait(), message.timeout)
            except TimeoutError:
                pass
        told = api_pb2.SandboxHandleMetadata(app_id=sandbox.app)
        return api_pb2.SandboxWaitResponse(
            result=self._modal.sandbox(message.sandbox_id).result, metadata=told
        )

    async def SandboxGetTaskIdV2(
        self, message: api_pb2.SandboxGetTaskIdRequest, metadata: Metadata
    ) -> api_pb2.SandboxGetTaskIdResponse:
        _authenticate(metadata, token=True)
        return api_pb2.SandboxGetTaskIdResponse(task_id=self._modal.sandbox(message.sandbox_id).task)

    async def SandboxGetCommandRouterAccess(
        self, message: api_pb2.SandboxGetCommandRouterAccessRequest, metadata: Metadata
    ) -> api_pb2.SandboxGetCommandRouterAccessResponse:
        _authenticate(metadata, token=True)
        sandbox = self._modal.sandbox(message.sandbox_id)
        return api_pb2.SandboxGetCommandRouterAccessResponse(jwt=_jwt(sandbox.task), url=self._modal.url)

    async def SandboxTagsGetV2(
        self, message: api_pb2.SandboxTagsGetRequest, metadata: Metadata
    ) -> api_pb2.SandboxTagsGetResponse:
        _authenticate(metadata, token=True)
        labels = self._modal.sandbox(message.sandbox_id).box.labels
        return api_pb2.SandboxTagsGetResponse(
            tags=[api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in labels.items()]
        )

    async def SandboxListV2(
        self, message: api_pb2.SandboxListRequest, metadata: Metadata
    ) -> api_pb2.SandboxListResponse:
        _authenticate(metadata, token=True)
        known(message, "app_id", "before_timestamp", "tags.tag_name", "tags.tag_value")
        wanted = {tag.tag_name: tag.tag_value for tag in message.tags}.items()
        before = message.before_timestamp or time.time() + 1
        found = [
            api_pb2.SandboxInfo(id=each.box.id, created_at=each.box.started, app_id=each.app)
            for each in self._modal.sandboxes.values()
            if each.running and each.app == message.app_id and wanted <= dict(each.box.labels).items()
        ]
        page = sorted((each for each in found if each.created_at < before), key=lambda each: -each.created_at)
        return api_pb2.SandboxListResponse(sandboxes=page[:2])

    async def SandboxTerminateV2(
        self, message: api_pb2.SandboxTerminateRequest, metadata: Metadata
    ) -> api_pb2.SandboxTerminateResponse:
        _authenticate(metadata, token=True)
        sandbox = self._modal.sandbox(message.sandbox_id)
        before = sandbox.result
        if sandbox.box.id in self._engine.boxes:
            sandbox.terminated = True
            await self._engine.vanish(sandbox.box)
        return api_pb2.SandboxTerminateResponse(existing_result=before)

    def _image(self, id: str) -> str:
        """What the engine calls it."""
        name = id.removeprefix("im-")
        if id not in self._modal.images and name not in self._engine.snapshots:
            raise Refused(Status.NOT_FOUND, f"Image with ID {id} not found")
        return name


class Router:
    """The commands of a sandbox."""

    def __init__(self, modal: Modal) -> None:
        self._modal = modal

    async def TaskExecStart(
        self, message: router_pb2.TaskExecStartRequest, metadata: Metadata
    ) -> router_pb2.TaskExecStartResponse:
        sandbox = self._sandbox(message.task_id, metadata)
        known(message, "task_id", "exec_id", "command_args", "stdout_config", "stderr_config")
        if sum(map(len, message.command_args)) > 1 << 16:
            raise Refused(Status.INVALID_ARGUMENT, "the arguments are too long")
        if message.exec_id not in sandbox.execs:
            program = await self._modal.engine.spawn(
                sandbox.box,
                list(message.command_args),
                env={"MODAL_SANDBOX_ID": sandbox.box.id, "MODAL_TASK_ID": sandbox.task},
                user="root",
                stdin=True,
            )
            sandbox.execs[message.exec_id] = Exec(program)
            self._modal.used(sandbox)
            self._modal.engine.begin(self._follow(sandbox, message.exec_id))
        return router_pb2.TaskExecStartResponse()

    async def _follow(self, sandbox: Sandbox, id: str) -> None:
        await sandbox.execs[id].follow()
        self._modal.used(sandbox)

    async def TaskExecStdioRead(
        self, message: router_pb2.TaskExecStdioReadRequest, metadata: Metadata
    ) -> AsyncIterator[router_pb2.TaskExecStdioReadResponse]:
        running = self._exec(message.task_id, message.exec_id, metadata)
        stdout = message.file_descriptor == router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        output = running.outputs["stdout" if stdout else "stderr"]
        try:
            async for data in output.read(message.offset):
                yield router_pb2.TaskExecStdioReadResponse(data=data)
        except Misplaced as error:
            raise Refused(Status.OUT_OF_RANGE, str(error)) from None
        self._sandbox(message.task_id, metadata)

    async def TaskExecStdinWrite(
        self, message: router_pb2.TaskExecStdinWriteRequest, metadata: Metadata
    ) -> router_pb2.TaskExecStdinWriteResponse:
        running = self._exec(message.task_id, message.exec_id, metadata)
        try:
            await running.write(message.offset, message.data, eof=message.eof)
        except Misplaced as error:
            raise Refused(Status.INVALID_ARGUMENT, str(error)) from None
        except NoSuchProcess:
            raise Refused(Status.FAILED_PRECONDITION, "stdin is closed") from None
        return router_pb2.TaskExecStdinWriteResponse()

    async def TaskExecWait(
        self, message: router_pb2.TaskExecWaitRequest, metadata: Metadata
    ) -> router_pb2.TaskExecWaitResponse:
        running = self._exec(message.task_id, message.exec_id, metadata)
        await running.program.ended.wait()
        self._sandbox(message.task_id, metadata)
        status = running.program.status
        return router_pb2.TaskExecWaitResponse(**({"code": status} if status >= 0 else {"signal": -status}))

    async def TaskSnapshotFilesystem(
        self, message: router_pb2.TaskSnapshotFilesystemRequest, metadata: Metadata
    ) -> router_pb2.TaskSnapshotFilesystemResponse:
        known(message, "task_id", "snapshot_id", "ttl_seconds")
        id = await self._modal.engine.snapshot(self._sandbox(message.task_id, metadata).box)
        return router_pb2.TaskSnapshotFilesystemResponse(image_id=f"im-{id}")

    def _sandbox(self, task: str, metadata: Metadata) -> Sandbox:
        if metadata.get("authorization") != f"Bearer {_jwt(task)}":
            raise Refused(Status.UNAUTHENTICATED, "Invalid token")
        for sandbox in self._modal.sandboxes.values():
            if sandbox.task == task and sandbox.running:
                return sandbox
        raise Refused(Status.NOT_FOUND, f"Task {task} not found")

    def _exec(self, task: str, id: str, metadata: Metadata) -> Exec:
        running = self._sandbox(task, metadata).execs.get(id)
        if running is None:
            raise Refused(Status.NOT_FOUND, f"Exec {id} not found")
        return running


def _check_definition(message: api_pb2.SandboxCreateV2Request) -> None:
    known(
        message,
        *("app_id", "tags.tag_name", "tags.tag_value", "definition.image_id", "definition.entrypoint_args"),
        *("definition.timeout_secs", "definition.idle_timeout_secs"),
        *(
            f"definition.resources.{name}"
            for name in ("milli_cpu", "milli_cpu_max", "memory_mb", "memory_mb_max")
        ),
        *("definition.network_access.network_access_type", "definition.scheduler_placement.regions"),
    )
    seconds = message.definition.timeout_secs
    if not message.definition.idle_timeout_secs <= seconds <= LONGEST_LIFE:
        raise Refused(
            Status.INVALID_ARGUMENT, f"timeout must be at most {LONGEST_LIFE} seconds, got {seconds}"
        )
    for tag in message.tags:
        if not (_TAG.fullmatch(tag.tag_name) and _TAG.fullmatch(tag.tag_value)):
            raise Refused(Status.INVALID_ARGUMENT, f"Invalid tag {tag.tag_name}: {tag.tag_value}")


def _authenticate(metadata: Metadata, *, token: bool = False) -> None:
    given = metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")
    if given != (TOKEN_ID, TOKEN_SECRET) or (
        token and metadata.get("x-modal-auth-token") != _jwt("workspace")
    ):
        raise Refused(Status.UNAUTHENTICATED, "Token ID is malformed")


def _jwt(subject: str) -> str:
    claims = json.dumps({"sub": subject, "exp": 1 << 33}).encode()
    return f"e30.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.none"


if __name__ == "__main__":
    server.main(Modal)
