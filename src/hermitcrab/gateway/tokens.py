"""Bearer tokens: made once, kept as a hash, known to a running gateway within a second.

A token is `hct_ID_SECRET`. The id finds the row, the hash of the whole is compared in constant time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from hermitcrab.errors import ConfigError
from hermitcrab.gateway.database import Database, DatabaseError, Row
from hermitcrab.gateway.settings import TENANT_NAME

_PREFIX = "hct"
_FORM = re.compile(rf"{_PREFIX}_([0-9a-f]{{12}})_[A-Za-z0-9_-]{{43}}")
_FRESH_SECONDS = 1.0
"""How long a revoked token may go on."""
_UNKNOWN_SECONDS = 0.05
"""A token that is not known may have been made just now: look again, but not for everybody who guesses."""
_USED_SECONDS = 60.0
"""How exact `used` is."""
_NOBODY = "0" * 64


@dataclass(frozen=True, kw_only=True)
class Token:
    """All that is kept of it."""

    id: str
    tenant: str
    name: str
    hash: str
    operator: bool
    """Sees what all tenants have, and the metrics."""
    created: float
    used: float | None = None
    revoked: float | None = None


async def create(database: Database, *, tenant: str, name: str, operator: bool = False) -> tuple[Token, str]:
    """The row, and the text that is shown this once."""
    if not re.fullmatch(TENANT_NAME, tenant):
        raise ConfigError(f"tenant: got {tenant!r}, takes letters, digits, dots, dashes and _, 63 at most")
    if not name or len(name) > 100 or not name.isprintable():
        raise ConfigError(f"name: got {name!r}, takes a few printable words, 100 characters at most")
    id = secrets.token_hex(6)
    text = f"{_PREFIX}_{id}_{secrets.token_urlsafe(32)}"
    token = Token(id=id, tenant=tenant, name=name, hash=_hash(text), operator=operator, created=time.time())
    await database.run(
        "INSERT INTO tokens (id, tenant, name, hash, operator, created) VALUES ($1, $2, $3, $4, $5, $6)",
        *(token.id, token.tenant, token.name, token.hash, int(token.operator), token.created),
    )
    return token, text


async def every(database: Database) -> list[Token]:
    """The oldest first, revoked ones among them."""
    return [_token(row) for row in await database.rows("SELECT * FROM tokens ORDER BY created, id")]


async def revoke(database: Database, id: str) -> Token | None:
    """The token, if there is one of that id; revoked now, or already."""
    await database.run("UPDATE tokens SET revoked = $1 WHERE id = $2 AND revoked IS NULL", time.time(), id)
    found = await database.rows("SELECT * FROM tokens WHERE id = $1", id)
    return _token(found[0]) if found else None


class Tokens:
    """All tokens, as a running gateway knows them."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self.database, self._clock = database, clock
        self._known: dict[str, Token] = {}
        self._read = float("-inf")
        self._reading = asyncio.Lock()
        self._used: dict[str, float] = {}
        self._noting: set[asyncio.Task[None]] = set()

    async def find(self, text: str) -> Token | None:
        """The token of that text, unless it was revoked."""
        match = _FORM.fullmatch(text)
        id = match[1] if match else ""
        await self._refreshed(_FRESH_SECONDS)
        if id and id not in self._known:
            await self._refreshed(_UNKNOWN_SECONDS)
        token = self._known.get(id)
        # Compared in any case: an id that does not exist takes as long as a wrong secret.
        same = hmac.compare_digest(_hash(text), token.hash if token else _NOBODY)
        if token is None or not same or token.revoked is not None:
            return None
        self._note_use(token)
        return token

    async def known(self, id: str) -> Token | None:
        """The token of that id, unless it was revoked."""
        await self._refreshed(_FRESH_SECONDS)
        token = self._known.get(id)
        return token if token is not None and token.revoked is None else None

    async def any(self) -> bool:
        """Whether one was ever made: revoking the last one opens no door."""
        await self._refreshed(_FRESH_SECONDS)
        return bool(self._known)

    async def _refreshed(self, seconds: float) -> None:
        if self._clock() - self._read < seconds:
            return
        async with self._reading:
            if self._clock() - self._read < seconds:
                return
            now = self._clock()
            self._known = {token.id: token for token in await every(self.database)}
            self._read = now

    def _note_use(self, token: Token) -> None:
        now = self._clock()
        if now - self._used.get(token.id, float("-inf")) >= _USED_SECONDS:
            self._used[token.id] = now
            task = asyncio.create_task(self._write_use(token.id))
            self._noting.add(task)
            task.add_done_callback(self._noting.discard)

    async def _write_use(self, id: str) -> None:
        try:
            await self.database.run("UPDATE tokens SET used = $1 WHERE id = $2", time.time(), id)
        except DatabaseError:
            pass  # nobody's request should fail for that


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _token(row: Row) -> Token:
    return Token(
        id=row["id"],
        tenant=row["tenant"],
        name=row["name"],
        hash=row["hash"],
        operator=bool(row["operator"]),
        created=row["created"],
        used=row["used"],
        revoked=row["revoked"],
    )
