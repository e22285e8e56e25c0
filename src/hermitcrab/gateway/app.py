"""The application: routes, errors and the OpenAPI document, behind the door."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from hermitcrab import __version__
from hermitcrab.errors import SandboxError
from hermitcrab.gateway import (
    page,
    routes_execs,
    routes_files,
    routes_operator,
    routes_sandboxes,
    routes_snapshots,
    terminal,
)
from hermitcrab.gateway.answers import fault_of, internal, refusal
from hermitcrab.gateway.calls import Context
from hermitcrab.gateway.database import DatabaseUnavailable
from hermitcrab.gateway.door import Door
from hermitcrab.gateway.models import Refusal
from hermitcrab.gateway.records import GatewayFault

_MODULES = (routes_execs, routes_sandboxes, routes_snapshots, routes_files, routes_operator, terminal)
_FRAMEWORK = (RequestValidationError, HTTPException)
_REFUSALS = {
    400: "The request makes no sense.",
    401: "No valid token.",
    403: "Not allowed.",
    404: "There is no such thing, or it is somebody else's.",
    408: "The body did not come.",
    409: "It is not in a state for that.",
    410: "The sandbox has ended, or is lost.",
    413: "The body is too large.",
    415: "The body is not JSON.",
    429: "Too many at once; `Retry-After` says when to come again.",
    501: "This engine cannot do that.",
    502: "The sandbox could not be started.",
    503: "The engine, the database or another gateway does not answer.",
}


def application(context: Context) -> ASGIApp:
    """Everything that is served."""
    app = FastAPI(
        title="hermitcrab gateway",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses={status: {"model": Refusal, "description": words} for status, words in _REFUSALS.items()},
    )
    app.state.context = context
    lean = routes_execs.add_lean_routes(app)
    for module in _MODULES:
        app.include_router(module.router)
    app.router.routes.extend(page.routes)
    context.doorkeeper.sessions = page.sessions(context)
    for kind in (GatewayFault, SandboxError, DatabaseUnavailable, ValidationError, *_FRAMEWORK):
        app.add_exception_handler(kind, _refused)
    app.openapi = _described(app)  # type: ignore[method-assign]
    return Door(app, context, lean)


async def _refused(request: Request, error: Exception) -> Response:
    return refusal(fault_of(error) or internal())


def _described(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """FastAPI's document, with our errors in place of its own and the token that is asked for."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        document = make()
        if "securitySchemes" in document.get("components", {}):
            return document
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document

    return openapi
