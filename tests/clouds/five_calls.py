"""A gateway that speaks the five fixed calls and nothing else: what is not among them is refused.

It is as blunt as somebody else's may be: a command is over when its output is, time limits kill at once,
output is text, and a running exec tells nothing of it. A command that says `quirk:NAME` gets an odd answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from tests.clouds import server
from tests.clouds.engine import Box, Engine, NoSuchDirectory, Program
from tests.clouds.rest import Refused, RestProvider, refuse_unknown

TOKEN = "five-calls-token"
_CREATE = {
    *("image", "cwd", "cpu", "memoryMiB", "diskMiB", "timeoutMs", "idleTimeoutMs"),
    *("persistentFilesystem", "logicalKey"),
}
_START = {"execId", "command", "timeoutMs", "stdinData", "cwd"}
# Whatever the command does to get away inherits this limit, which the kernel does not use.
_RUN = 'exec 2>&1; exec prlimit --locks="$0": -- bash -c "$1"'
_FIRST_MARK = 1 << 40
_RAW = "raw:"


@dataclass
class Exec:
    id: str
    mark: int
    quirk: str
    status: str = "running"
    output: bytearray = field(default_factory=bytearray)
    returncode: int | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class FiveCalls(RestProvider):
    name = "five_calls"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._made: dict[str, str] = {}
        """Idempotency key -> the sandbox that was made for it."""
        self._execs: dict[str, dict[str, Exec]] = {}
        self._snapshots: dict[str, str] = {}
        """Logical key -> the latest snapshot."""
        self._marks = itertools.count(_FIRST_MARK + os.getpid() * 1000)

    def variables(self, url: str) -> Mapping[str, str]:
        return {
            "HERMITCRAB_GATEWAY_URL": url,
            "HERMITCRAB_GATEWAY_TOKEN": TOKEN,
            "HERMITCRAB_MANAGED_MODAL_URL": url,
            "HERMITCRAB_MANAGED_MODAL_TOKEN": TOKEN,
        }

    def refusal(self, status: int, message: str) -> bytes:
        if message.startswith(_RAW):
            return message.removeprefix(_RAW).encode()
        return json.dumps({"error": message, "code": "refused"}).encode()

    def application(self) -> ASGIApp:
        execs = "/v1/sandboxes/{id}/execs"
        return Starlette(
            routes=[
                self.route("POST", "/v1/sandboxes", self.create),
                self.route("POST", execs, self.start),
                self.route("GET", execs + "/{exec_id}", self.poll),
                self.route("POST", execs + "/{exec_id}/cancel", self.cancel),
                self.route("POST", "/v1/sandboxes/{id}/terminate", self.terminate),
            ]
        )

    def authorize(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            raise Refused(401, "unknown token")
        if request.url.query:
            raise Refused(400, f"this server knows no {request.url.query}")

    async def create(self, request: Request) -> Response:
        body = await _read(request, _CREATE, _CREATE - {"diskMiB"})
        key = str(uuid.UUID(request.headers["x-idempotency-key"]))
        if key not in self._made:
            made_from = self._snapshots.get(body["logicalKey"], "") if body["persistentFilesystem"] else ""
            box = await self.engine.create(made_from or body["image"])
            box.settings = body
            self._made[key] = box.id
            self._execs[box.id] = {}
        return JSONResponse({} if body["image"] == "no-id" else {"id": self._made[key]})

    async def start(self, request: Request) -> Response:
        box = self._box(request)
        body = await _read(request, _START, {"execId", "command", "timeoutMs"})
        known = self._execs[box.id]
        if body["execId"] not in known:
            quirk = re.search(r"quirk:([a-z-]+)", body.get("stdinData", ""))
            exec = Exec(body["execId"], next(self._marks), quirk[1] if quirk else "")
            known[exec.id] = exec
            await self._begin(box, exec, body)
            exec.begun.set()
            if exec.quirk == "at-once":
                await exec.over.wait()
        return self._told(known[body["execId"]])

    async def poll(self, request: Request) -> Response:
        return self._told(self._exec(request))

    async def cancel(self, request: Request) -> Response:
        exec = self._exec(request)
        if exec.quirk != "deaf":
            await self._end(exec, "cancelled")
        return self._told(exec)

    async def terminate(self, request: Request) -> Response:
        box = self._box(request)
        body = await _read(request, {"snapshotBeforeTerminate"}, {"snapshotBeforeTerminate"})
        if body["snapshotBeforeTerminate"]:
            self._snapshots[str(box.settings["logicalKey"])] = await self.engine.snapshot(box)
        await self.engine.vanish(box)
        return JSONResponse({})

    async def _begin(self, box: Box, exec: Exec, body: Mapping[str, Any]) -> None:
        cwd = body.get("cwd") or box.settings["cwd"] or "/root"
        argv = ["bash", "-c", _RUN, str(exec.mark), body["command"]]
        try:
            program = await self.engine.spawn(box, argv, env={}, cwd=str(cwd), user="root", stdin=True)
        except NoSuchDirectory:
            raise Refused(400, f"no such directory: {cwd}") from None
        for work in (
            self._feed(program, body.get("stdinData", "").encode()),
            self._follow(exec, program),
            self._limit(exec, body["timeoutMs"] / 1000),
        ):
            self.engine.begin(work)

    async def _feed(self, program: Program, data: bytes) -> None:
        await program.write(data)
        program.close_stdin()

    async def _follow(self, exec: Exec, program: Program) -> None:
        async for _, data in program.output():
            exec.output += data
        await program.ended.wait()
        exec.returncode = program.status if program.status >= 0 else 128 - program.status
        exec.status = "completed" if exec.status == "running" else exec.status
        exec.over.set()

    async def _limit(self, exec: Exec, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await exec.over.wait()
        except TimeoutError:
            if exec.quirk != "deaf":
                await self._end(exec, "timeout")

    async def _end(self, exec: Exec, status: str) -> None:
        await exec.begun.wait()
        if not exec.over.is_set():
            exec.status = status
            await asyncio.to_thread(_end_marked, exec.mark)
            await exec.over.wait()

    def _told(self, exec: Exec) -> Response:
        told: dict[str, Any] = {"execId": exec.id, "status": exec.status if exec.over.is_set() else "running"}
        if exec.over.is_set():
            told = {"status": exec.status, "output": exec.output.decode(errors="replace")}
            told["returncode"] = exec.returncode
        match exec.quirk:
            case "other-exec-id":
                told["execId"] = str(uuid.uuid4())
            case "no-returncode":
                told.pop("returncode", None)
            case "odd-status":
                told["status"] = "asleep"
            case "failed" if exec.over.is_set():
                told = {"status": "failed", "output": "half of it", "error": "the node went away"}
            case "not-an-object":
                return JSONResponse(["?"])
        return JSONResponse(told)

    def _box(self, request: Request) -> Box:
        box = self.engine.boxes.get(request.path_params["id"])
        if box is None or box.state != "running":
            raise Refused(404, "no such sandbox")
        return box

    def _exec(self, request: Request) -> Exec:
        exec = self._execs[self._box(request).id].get(request.path_params["exec_id"])
        if exec is None or exec.quirk == "forgotten":
            raise Refused(404, "no such exec")
        return exec


async def _read(request: Request, known: set[str], needed: set[str]) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(await request.body())
    refuse_unknown(body, known)
    if missing := needed - body.keys():
        raise Refused(400, f"{', '.join(sorted(missing))} must be given")
    return body


def _end_marked(mark: int) -> None:
    while _kill_marked(mark):
        time.sleep(0.005)


def _kill_marked(mark: int) -> int:
    """How many there were."""
    found = 0
    for limits in Path("/proc").glob("[0-9]*/limits"):
        try:
            if re.search(rf"Max file locks +{mark} ", limits.read_text()):
                state = (limits.parent / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX":
                    os.kill(int(limits.parent.name), signal.SIGKILL)
                    found += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


if __name__ == "__main__":
    server.main(FiveCalls)
