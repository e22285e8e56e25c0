"""Who is logged in on the page: a cookie that stands for a token, for some hours.

The cookie is a random text of which the database has the hash alone. It is worth what its token is worth:
when that is revoked, so is the cookie.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from hermitcrab.gateway.identity import Identity
from hermitcrab.gateway.records import GatewayFault
from hermitcrab.gateway.tokens import Tokens

COOKIE = "hermitcrab_page"
SECONDS = 12 * 3600
_HEADER = "x-hermitcrab-page"
_SAFE = ("GET", "HEAD", "OPTIONS")


class PageSessions:
    """A `SessionReader`, and how its sessions begin and end."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def begin(self, text: str) -> str | None:
        """The cookie's value for whoever has this token; None when there is no such token."""
        token = await self._tokens.find(text)
        if token is None:
            return None
        value, now = secrets.token_urlsafe(32), time.time()
        await self._tokens.database.all_of(
            ("DELETE FROM page_sessions WHERE expires < $1", (now,)),
            (
                "INSERT INTO page_sessions (hash, token, expires) VALUES ($1, $2, $3)",
                (_hash(value), token.id, now + SECONDS),
            ),
        )
        return value

    async def end(self, connection: HTTPConnection) -> None:
        if value := connection.cookies.get(COOKIE):
            await self._tokens.database.run("DELETE FROM page_sessions WHERE hash = $1", _hash(value))

    async def __call__(self, connection: HTTPConnection) -> Identity | None:
        value = connection.cookies.get(COOKIE)
        if not value:
            return None
        rows = await self._tokens.database.rows(
            "SELECT token FROM page_sessions WHERE hash = $1 AND expires > $2", _hash(value), time.time()
        )
        token = await self._tokens.known(rows[0]["token"]) if rows else None
        if token is None:
            return None
        refuse_other_sites(connection)
        return Identity(token.tenant, token.name, token.operator)


def refuse_other_sites(connection: HTTPConnection) -> None:
    """A browser sends a cookie along whoever made it ask; only our own page may have things done."""
    headers, scope = connection.headers, connection.scope
    origin = headers.get("origin")
    elsewhere = origin is not None and urlsplit(origin).netloc != headers.get("host")
    if scope["type"] == "websocket":
        # Websockets know no header of ours, but browsers always say where they come from.
        allowed = origin is not None and not elsewhere
    else:
        allowed = not elsewhere and (scope["method"] in _SAFE or _HEADER in headers)
    if not allowed:
        raise GatewayFault(403, "forbidden", "Only the gateway's own page may do this with a cookie.")


def _hash(value: str) -> str:
    return hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()
