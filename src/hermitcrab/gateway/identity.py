"""Who asks: a bearer token, a session of the page, or anybody on this machine where no tokens were made."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from hermitcrab.gateway.records import GatewayFault
from hermitcrab.gateway.settings import LOCAL, is_loopback
from hermitcrab.gateway.tokens import Tokens

_PROXIED = frozenset((b"forwarded", b"x-forwarded-for", b"x-real-ip"))


@dataclass(frozen=True)
class Identity:
    """Whose request it is."""

    tenant: str
    name: str
    """Of the token, for the audit."""
    operator: bool = False
    """Sees what all tenants have, and the metrics."""


ANYBODY = Identity(LOCAL, "no token", operator=True)
SessionReader = Callable[[HTTPConnection], Awaitable[Identity | None]]
"""Reads a cookie of the page; raises GatewayFault(403) where another site may be behind the request."""


class Doorkeeper:
    """Says who asks, or raises GatewayFault(401)."""

    def __init__(self, tokens: Tokens, *, closed: bool) -> None:
        """`closed`: a token is asked for in any case."""
        self.tokens, self.closed = tokens, closed
        self.sessions: SessionReader | None = None
        """The page puts its own here."""

    async def identify(self, connection: HTTPConnection) -> Identity:
        headers = dict(connection.scope["headers"])
        given = headers.get(b"authorization")
        if given is not None:
            scheme, _, secret = given.partition(b" ")
            text = secret.strip().decode("latin-1")
            token = await self.tokens.find(text) if scheme.lower() == b"bearer" else None
            if token is None:
                raise unauthorized()
            return Identity(token.tenant, token.name, token.operator)
        if (
            self.sessions is not None
            and b"cookie" in headers
            and (known := await self.sessions(connection)) is not None
        ):
            return known
        if not self.closed and not await self.tokens.any():
            refuse_strangers(headers)
            return ANYBODY
        raise unauthorized()


def refuse_strangers(headers: Mapping[bytes, bytes]) -> None:
    """Without tokens only this machine's own programs are meant: no web page, and nobody behind a proxy."""
    if not _PROXIED.isdisjoint(headers):
        raise GatewayFault(401, "unauthorized", "Behind a proxy it takes tokens: `hermitcrab token create`.")
    host, origin = headers.get(b"host", b""), headers.get(b"origin")
    elsewhere = origin is not None and origin.partition(b"://")[2] != host
    if elsewhere or headers.get(b"sec-fetch-site") == b"cross-site" or not _on_loopback(host):
        raise GatewayFault(403, "forbidden", "This gateway answers programs on its own machine only.")


@lru_cache(maxsize=64)
def _on_loopback(host: bytes) -> bool:
    """Whether a Host header names this machine; a page that had its name point here sends its own."""
    try:
        return is_loopback(urlsplit("//" + host.decode()).hostname or "")
    except ValueError:
        return False


def unauthorized() -> GatewayFault:
    return GatewayFault(401, "unauthorized", "A valid bearer token is needed.")
