"""Answers and refusals: JSON, and every error as `{error, code}`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Send

from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    SandboxError,
    SandboxLost,
    SandboxStartError,
    SessionClosed,
    TransferError,
    UnsupportedCapability,
)
from hermitcrab.files.tools import NotThere
from hermitcrab.gateway.database import DatabaseUnavailable
from hermitcrab.gateway.records import GatewayFault

_JSON = (b"content-type", b"application/json")
_LARGE = 1 << 20
"""What takes so long to write that others should not have to wait for it."""

_STATUSES: tuple[tuple[type[SandboxError], int, str], ...] = (
    (NotThere, 404, "no_such_file"),
    (UnsupportedCapability, 501, "unsupported"),
    (ConfigError, 400, "invalid_request"),
    (SandboxLost, 410, "sandbox_lost"),
    (SessionClosed, 410, "sandbox_lost"),
    (TransferError, 409, "file_error"),
    (SandboxStartError, 502, "sandbox_start_failed"),
    (BackendUnavailable, 503, "engine_unavailable"),
)


_CODES = {
    400: "invalid_request",
    404: "not_found",
    405: "method_not_allowed",
    413: "too_large",
    415: "not_json",
}


class Json(Response):
    """A plain value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def refusal(fault: GatewayFault) -> Json:
    headers = {}
    if fault.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(fault.retry_after)))
    if fault.status == 401:
        headers["www-authenticate"] = "Bearer"
    return Json(
        {"error": fault.error, "code": fault.code, **fault.details}, status_code=fault.status, headers=headers
    )


def fault_of(error: Exception) -> GatewayFault | None:
    """What to answer for an error; None for one that is our own mistake."""
    if isinstance(error, GatewayFault):
        return error
    if isinstance(error, RequestValidationError | ValidationError):
        return invalid(error.errors())
    if isinstance(error, HTTPException):
        return GatewayFault(error.status_code, _code(error.status_code), error.detail)
    if isinstance(error, DatabaseUnavailable):
        return GatewayFault(503, "database_unavailable", "The database does not answer.", retry_after=1)
    for kind, status, code in _STATUSES:
        if isinstance(error, kind):
            return GatewayFault(status, code, str(error))
    return None


def invalid(problems: Any) -> GatewayFault:
    """Says where and why, and repeats nothing that was sent."""
    first: Mapping[str, Any] = problems[0]
    if isinstance(first.get("input"), bytes) and first["loc"] == ("body",):
        return not_json()  # nobody tried to read it
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return GatewayFault(400, "invalid_request", f"{where}: {first['msg']}" if where else first["msg"])


def not_json() -> GatewayFault:
    return GatewayFault(
        415, "not_json", "The body must be JSON, with the header `content-type: application/json`."
    )


def internal() -> GatewayFault:
    return GatewayFault(500, "internal", "The gateway made a mistake; its log says more.")


def _code(status: int) -> str:
    return _CODES.get(status, f"http_{status}")


async def send_json(send: Send, value: Any, *, size: int = 0) -> None:
    """The shortest way out. `size`: about how large it is, where it may be large."""
    body = to_json(value) if size < _LARGE else await asyncio.to_thread(to_json, value)
    headers = [_JSON, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
