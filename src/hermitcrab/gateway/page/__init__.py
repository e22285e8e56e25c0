"""The dashboard at `/`: static files, a login, and one call of its own; all else is the gateway's API."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from hermitcrab.gateway.calls import Context
from hermitcrab.gateway.identity import unauthorized
from hermitcrab.gateway.page.overview import Overview
from hermitcrab.gateway.page.sessions import COOKIE, SECONDS, PageSessions, refuse_other_sites
from hermitcrab.gateway.records import GatewayFault

_STATIC = Path(str(resources.files(__name__))) / "static"
_HEADERS = {
    "cache-control": "no-cache",
    # xterm.js sets styles on its own elements.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_MOST_BYTES = 4096


def sessions(context: Context) -> PageSessions:
    return PageSessions(context.doorkeeper.tokens)


async def _index(request: Request) -> Response:
    return FileResponse(_STATIC / "index.html", headers=_HEADERS)


async def _login(request: Request) -> Response:
    refuse_other_sites(request)
    cookie = await sessions(_context(request)).begin(await _token_in(request))
    if cookie is None:
        raise GatewayFault(401, "unauthorized", "There is no such token, or it was revoked.")
    answer = JSONResponse({})
    answer.set_cookie(
        COOKIE,
        cookie,
        max_age=SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return answer


async def _logout(request: Request) -> Response:
    refuse_other_sites(request)
    await sessions(_context(request)).end(request)
    answer = JSONResponse({})
    answer.delete_cookie(COOKIE)
    return answer


async def _overview(request: Request) -> Response:
    context = _context(request)
    identity = await context.doorkeeper.identify(request)
    state = request.app.state
    if not hasattr(state, "overview"):
        state.overview = Overview(context)
    return JSONResponse(await state.overview.seen_by(identity), headers={"cache-control": "no-store"})


async def _token_in(request: Request) -> str:
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise GatewayFault(413, "too_large", "That is no token.")
    try:
        token = json.loads(body)["token"]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GatewayFault(400, "bad_request", 'This takes {"token": "..."}.') from None
    if not isinstance(token, str):
        raise unauthorized()
    return token


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


routes: list[BaseRoute] = [
    Route("/", _index),
    Route("/page/login", _login, methods=["POST"]),
    Route("/page/logout", _logout, methods=["POST"]),
    Route("/page/overview", _overview),
    Mount("/page", StaticFiles(directory=_STATIC)),
]
"""The application adds them to its own."""
