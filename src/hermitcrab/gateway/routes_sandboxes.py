"""Sandboxes: create, list, end, keep, copy."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Header, Query

from hermitcrab.gateway.answers import Json
from hermitcrab.gateway.calls import Called
from hermitcrab.gateway.images import chosen_image
from hermitcrab.gateway.models import (
    Create,
    Fork,
    Network,
    NetworkIs,
    Sandbox,
    Sandboxes,
    Snapshot,
    Terminate,
    sandbox_answer,
)
from hermitcrab.gateway.records import SandboxRequest
from hermitcrab.gateway.settings import Limits, at_most
from hermitcrab.gateway.wire import CPU, IDEMPOTENCY_KEY, LEAST_IDLE_MS, MEMORY_MIB

router = APIRouter(prefix="/v1/sandboxes", tags=["sandboxes"])
Key = Annotated[
    str,
    Header(
        alias=IDEMPOTENCY_KEY,
        max_length=128,
        pattern=r"^[\x21-\x7e]*$",
        description="The same key answers with the same sandbox.",
    ),
]


@router.post("", response_model=Sandbox)
async def create(call: Called, body: Create, key: Key = "") -> Json:
    """Create a sandbox, or find the one that this key created."""
    settings = call.context.settings
    image = chosen_image(settings.engine_of(call.tenant), body.image or "")
    record = await call.gateway.create(call.tenant, within(body, image, call.limits), key)
    call.note("sandbox.create", sandbox=record.id, image=image, engine=record.engine)
    return Json(sandbox_answer(record))


@router.get("", response_model=Sandboxes)
async def listing(
    call: Called, everybody: Annotated[bool, Query(alias="all", description="For operators.")] = False
) -> Json:
    """The tenant's sandboxes, the newest first; those that ended as long as they are kept."""
    if everybody:
        call.as_operator()
    records = await call.gateway.sandboxes(None if everybody else call.tenant)
    return Json({"sandboxes": [sandbox_answer(each) for each in records]})


@router.get("/{sandbox_id}", response_model=Sandbox)
async def sandbox(call: Called, sandbox_id: str) -> Json:
    return Json(sandbox_answer(await call.gateway.sandbox(call.tenant, sandbox_id)))


@router.post("/{sandbox_id}/terminate", response_model=Sandbox)
async def terminate(
    call: Called, sandbox_id: str, body: Annotated[Terminate, Body(default_factory=Terminate)]
) -> Json:
    """End it and everything in it. May be asked for again."""
    snapshot = body.snapshot_before_terminate
    record = await call.gateway.terminate(call.tenant, sandbox_id, snapshot)
    call.note("sandbox.terminate", sandbox=sandbox_id, snapshot=snapshot)
    return Json(sandbox_answer(record))


@router.post("/{sandbox_id}/snapshot", response_model=Snapshot)
async def snapshot(call: Called, sandbox_id: str) -> Json:
    """Keep it as it is now; a create that names the `snapshot` begins with it."""
    kept = await call.gateway.snapshot(call.tenant, sandbox_id)
    call.note("sandbox.snapshot", sandbox=sandbox_id, snapshot=kept)
    return Json({"snapshot": kept})


@router.post("/{sandbox_id}/fork", response_model=Sandboxes)
async def fork(call: Called, sandbox_id: str, body: Annotated[Fork, Body(default_factory=Fork)]) -> Json:
    """Independent copies of it."""
    copies = await call.gateway.fork(call.tenant, sandbox_id, body.count)
    call.note("sandbox.fork", sandbox=sandbox_id, copies=[each.id for each in copies])
    return Json({"sandboxes": [sandbox_answer(each) for each in copies]})


@router.post("/{sandbox_id}/network", response_model=NetworkIs)
async def network(call: Called, sandbox_id: str, body: Network) -> Json:
    """Let it reach the network, or not, from now on; 501 where the engine cannot."""
    await call.gateway.set_network(call.tenant, sandbox_id, body.allowed)
    call.note("sandbox.network", sandbox=sandbox_id, allowed=body.allowed)
    return Json({"allowed": body.allowed})


def within(body: Create, image: str, limits: Limits) -> SandboxRequest:
    """What is asked for, within what this tenant may have."""
    return SandboxRequest(
        image=image,
        cwd=body.cwd or "",
        cpu=at_most(body.cpu or CPU, limits.cpu),
        memory_mib=at_most(body.memory_mib or MEMORY_MIB, limits.memory_mib),
        disk_mib=at_most(body.disk_mib, limits.disk_mib),
        timeout_ms=min(body.timeout_ms, limits.life_ms),
        idle_timeout_ms=max(body.idle_timeout_ms, LEAST_IDLE_MS),
        persistent_filesystem=body.persistent_filesystem,
        logical_key=body.logical_key or "",
        network=body.network,
        snapshot=body.snapshot or "",
    )
