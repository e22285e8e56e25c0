"""Where the gateway's rows are: sqlite for one process, PostgreSQL for several. The same SQL for both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

Row = Any
"""Columns by their names: `row["id"]`."""
Statement = tuple[str, Sequence[Any]]
"""SQL with `$1`, `$2` ... and the values for them."""

FILE = "gateway.db"
_RETRY_FROM, _RETRY_MOST = 0.1, 5.0


class DatabaseError(Exception):
    """The database cannot be used, and what to do about it."""


class DatabaseUnavailable(DatabaseError):
    """It does not answer now; whether the last statement took effect is not known."""


class Conflict(DatabaseError):
    """A row that must be the only one of its kind is there already. Nothing was changed."""


class Database(Protocol):
    """All may raise DatabaseUnavailable."""

    shared: bool
    """Other processes may be at it, too."""

    async def rows(self, sql: str, *values: Any) -> list[Row]: ...
    async def run(self, sql: str, *values: Any) -> int:
        """How many rows it changed."""

    async def all_of(self, *statements: Statement) -> None:
        """All of them or none."""

    async def close(self) -> None: ...


async def open_database(url: str, state: Path, migrations: Sequence[str], *, alone: bool = True) -> Database:
    """`alone`: as a gateway, of which a sqlite file can have one only."""
    if url.startswith(("postgresql://", "postgres://")):
        from hermitcrab.gateway.postgres import Postgres  # an optional dependency

        return await Postgres.open(url, migrations)
    if url and not url.startswith("sqlite:"):
        raise DatabaseError("database: takes postgresql://... , sqlite:PATH, or nothing for sqlite")
    from hermitcrab.gateway.sqlite import Sqlite

    path = Path(url.removeprefix("sqlite:").removeprefix("//")) if url else state / FILE
    return Sqlite.open(path, migrations, alone=alone)


def newer(place: str, version: int, known: int) -> DatabaseError:
    return DatabaseError(f"{place} is of a newer hermitcrab (version {version}, known: {known}); upgrade")


async def persistently(work: Callable[[], Awaitable[T]]) -> T:
    """What must get into the database, however long that takes."""
    pause = _RETRY_FROM
    while True:
        try:
            return await work()
        except DatabaseUnavailable:
            await asyncio.sleep(pause)
            pause = min(2 * pause, _RETRY_MOST)
