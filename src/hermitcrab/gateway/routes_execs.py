"""Commands: start, poll, cancel; their output in pages and as it comes."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import APIRouter, FastAPI, Header, Query
from starlette.responses import Response

from hermitcrab.gateway.answers import Json
from hermitcrab.gateway.calls import Call, Called
from hermitcrab.gateway.events import EventStream, resumed_at
from hermitcrab.gateway.lean import Answer, LeanRoute, Wait
from hermitcrab.gateway.models import Exec, Execs, Signal, Start, exec_answer, listed_exec
from hermitcrab.gateway.records import ExecRecord, ExecRequest

_EXECS = "/v1/sandboxes/{sandbox_id}/execs"
_LARGEST_PAGE = 1 << 20
_SHOWN = 200

router = APIRouter(prefix=_EXECS, tags=["execs"])
Offset = Annotated[int, Query(ge=0, le=2**53 - 1)]


async def start(call: Called, sandbox_id: str, body: Start, wait: Wait = 0) -> Answer:
    """Run a command. An `execId` that is known already runs nothing, and answers as a poll does."""
    request = body.request()
    record = await call.gateway.start(call.tenant, sandbox_id, request)
    call.note("exec.start", sandbox=sandbox_id, exec=record.id, **_command(call, request))
    if wait and not record.status.over:
        record = await _waited(call, sandbox_id, record.id, wait)
    return await _answer(call, record)


async def poll(call: Called, sandbox_id: str, exec_id: str, wait: Wait = 0) -> Answer:
    """How far it is; `wait` holds the answer until it is over."""
    return await _answer(call, await _waited(call, sandbox_id, exec_id, wait))


def add_lean_routes(app: FastAPI) -> dict[tuple[str, int], LeanRoute]:
    """They, by their method and the number of parts that their paths have."""
    for path, endpoint, method in ((_EXECS, start, "POST"), (_EXECS + "/{exec_id}", poll, "GET")):
        app.router.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=Exec,
            response_model_exclude_unset=True,
            tags=["execs"],
            route_class_override=LeanRoute,
        )
    added = [each for each in app.router.routes if isinstance(each, LeanRoute)]
    return {(method, each.path.count("/") + 1): each for each in added for method in each.methods or ()}


@router.get("", response_model=Execs)
async def listing(call: Called, sandbox_id: str) -> Json:
    """The commands of a sandbox, the newest first."""
    records = await call.gateway.execs(call.tenant, sandbox_id)
    return Json({"execs": [listed_exec(each) for each in records]})


@router.post("/{exec_id}/cancel", response_model=Exec)
async def cancel(call: Called, sandbox_id: str, exec_id: str) -> Json:
    """End it; the answer comes when its processes are gone."""
    record = await call.gateway.cancel(call.tenant, sandbox_id, exec_id)
    call.note("exec.cancel", sandbox=sandbox_id, exec=exec_id)
    value, _ = await _answer(call, record)
    return Json(value)


@router.post("/{exec_id}/signal", response_model=Exec)
async def signal(call: Called, sandbox_id: str, exec_id: str, body: Signal) -> Json:
    """Send a signal to all that it started."""
    record = await call.gateway.signal(call.tenant, sandbox_id, exec_id, body.signal)
    call.note("exec.signal", sandbox=sandbox_id, exec=exec_id, signal=body.signal)
    value, _ = await _answer(call, record)
    return Json(value)


@router.get(
    "/{exec_id}/output",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}, "description": "The bytes."}},
)
async def output(
    call: Called,
    sandbox_id: str,
    exec_id: str,
    offset: Offset = 0,
    limit: Annotated[int, Query(ge=1, le=_LARGEST_PAGE)] = _LARGEST_PAGE,
) -> Response:
    """Exact bytes from an offset on. `x-offset` is the first one's place, `x-end` whether nothing follows."""
    page = await call.gateway.page(call.tenant, sandbox_id, exec_id, offset, limit)
    headers = {"x-offset": str(page.offset), "x-end": str(page.end).lower()}
    return Response(page.data, media_type="application/octet-stream", headers=headers)


@router.get(
    "/{exec_id}/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."}},
)
async def events(
    call: Called,
    sandbox_id: str,
    exec_id: str,
    offset: Offset = 0,
    last_event_id: Annotated[str, Header(pattern=r"^[0-9]{0,16}$")] = "",
) -> Response:
    """Output as it comes: `output` events with `{offset, data}` (base64), then one `end` with the exec.

    `Last-Event-ID` goes on after that event.
    """
    await call.gateway.exec(call.tenant, sandbox_id, exec_id)
    return EventStream(call, sandbox_id, exec_id, resumed_at(last_event_id, offset))


async def _waited(call: Call, sandbox_id: str, exec_id: str, wait: float) -> ExecRecord:
    if not wait:
        return await call.gateway.exec(call.tenant, sandbox_id, exec_id)
    record = await call.context.waiting.poll(call.gateway, call.tenant, sandbox_id, exec_id, wait)
    await call.renew()
    return record


async def _answer(call: Call, record: ExecRecord) -> Answer:
    if not record.status.over:
        return exec_answer(record), 0
    data = await _kept(call, record) if record.output_bytes else b""
    return exec_answer(record, data), len(data) + sum(map(len, record.told.values()))


async def _kept(call: Call, record: ExecRecord) -> bytes:
    """What is kept of its output, within the tenant's limit the last of it."""
    offset, pieces = max(0, record.output_bytes - call.limits.output_bytes), []
    while True:
        page = await call.gateway.page(
            call.tenant, record.sandbox, record.id, offset, call.limits.output_bytes
        )
        pieces.append(page.data)
        offset = page.offset + len(page.data)
        if page.end or not page.data:
            return b"".join(pieces)


def _command(call: Call, request: ExecRequest) -> dict[str, str]:
    """What the audit log has of it: enough to recognise it, and no secret unless the operator wants it.

    What is run counts, and not what a client calls it.
    """
    program = request.program
    digest = hashlib.sha256(request.command.encode()).digest() if program is None else program.digest
    told = {"sha256": digest.hex()}
    if call.context.settings.server.audit_commands:
        told["command"] = request.command[:_SHOWN]
    return told
