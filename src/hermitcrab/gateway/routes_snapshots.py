"""Snapshots that a tenant asked for: list and forget; a create begins with one."""

from __future__ import annotations

from fastapi import APIRouter

from hermitcrab.gateway.answers import Json
from hermitcrab.gateway.calls import Called, is_id
from hermitcrab.gateway.models import Snapshot, Snapshots, listed_snapshot
from hermitcrab.gateway.records import unknown_snapshot

router = APIRouter(prefix="/v1/snapshots", tags=["snapshots"])


@router.get("", response_model=Snapshots)
async def listing(call: Called) -> Json:
    """The newest first."""
    records = await call.gateway.snapshots(call.tenant)
    return Json({"snapshots": [listed_snapshot(each) for each in records]})


@router.delete("/{snapshot_id}", response_model=Snapshot)
async def forget(call: Called, snapshot_id: str) -> Json:
    """Remove what was kept."""
    if not is_id(snapshot_id):
        raise unknown_snapshot()
    await call.gateway.forget_snapshot(call.tenant, snapshot_id)
    call.note("snapshot.forget", snapshot=snapshot_id)
    return Json({"snapshot": snapshot_id})
