"""For whoever runs the gateway: is it well, and what does it do."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from hermitcrab.gateway.answers import Json
from hermitcrab.gateway.calls import Called, Context
from hermitcrab.gateway.metrics import CONTENT_TYPE
from hermitcrab.gateway.models import Health

router = APIRouter(tags=["operator"])


@router.get("/healthz", response_model=Health)
async def healthz(request: Request) -> Json:
    """Whether it serves; open to everybody, and says no more than that."""
    context: Context = request.app.state.context
    await context.gateway.database.rows("SELECT 1")
    return Json({"status": "ok"})


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "For Prometheus."}},
)
async def metrics(call: Called) -> Response:
    """For Prometheus; takes an operator's token."""
    call.as_operator()
    context = call.context
    page = context.metrics.page(call.gateway.statistics(), context.admission.crowds(), len(context.waiting))
    return Response(page, media_type=CONTENT_TYPE)
