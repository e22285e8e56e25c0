"""The gateway's rows in PostgreSQL, for several processes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from hermitcrab.gateway.database import Conflict, DatabaseError, DatabaseUnavailable, Row, Statement, newer

try:
    import asyncpg  # type: ignore[import-untyped]
except ImportError as error:
    raise DatabaseError("PostgreSQL needs asyncpg: pip install 'hermitcrab[postgres]'") from error

T = TypeVar("T")

_CONNECTIONS = 10
_PATIENCE = 10.0
_MIGRATING = 0x6865726D6974
"""The number of the lock under which the tables are made."""
_GONE = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.ReadOnlySQLTransactionError,
)


class Postgres:
    shared = True

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    @classmethod
    async def open(cls, url: str, migrations: Sequence[str]) -> Postgres:
        try:
            pool = await asyncpg.create_pool(
                url,
                min_size=1,
                max_size=_CONNECTIONS,
                timeout=_PATIENCE,
                command_timeout=_PATIENCE,
                reset=_unchanged,
            )
        except (*_GONE, asyncpg.PostgresError, asyncpg.InterfaceError, ValueError) as error:
            raise DatabaseError(f"PostgreSQL: {error}") from error
        opened = cls(pool)
        try:
            await opened._upgrade(migrations)
        except BaseException:
            pool.terminate()
            raise
        return opened

    async def rows(self, sql: str, *values: Any) -> list[Row]:
        return await _understood(lambda: self._pool.fetch(sql, *values))

    async def run(self, sql: str, *values: Any) -> int:
        done: str = await _understood(lambda: self._pool.execute(sql, *values))
        last = done.rpartition(" ")[2]  # as in "UPDATE 1"
        return int(last) if last.isdecimal() else 0

    async def all_of(self, *statements: Statement) -> None:
        async def together() -> None:
            async with self._pool.acquire() as connection, connection.transaction():
                for sql, values in statements:
                    await connection.execute(sql, *values)

        await _understood(together)

    async def close(self) -> None:
        try:
            await self._pool.close()
        except _GONE:
            self._pool.terminate()

    async def _upgrade(self, migrations: Sequence[str]) -> None:
        async def stepwise() -> None:
            async with self._pool.acquire() as connection, connection.transaction():
                await connection.execute("SELECT pg_advisory_xact_lock($1)", _MIGRATING)
                await connection.execute("CREATE TABLE IF NOT EXISTS version (number BIGINT NOT NULL)")
                version = await connection.fetchval("SELECT max(number) FROM version") or 0
                if version > len(migrations):
                    raise newer("the database", version, len(migrations))
                for number in range(version, len(migrations)):
                    await connection.execute(migrations[number])
                    await connection.execute("INSERT INTO version VALUES ($1)", number + 1)

        await _understood(stepwise)


async def _unchanged(connection: Any) -> None:
    """No statement of ours leaves anything behind that would have to be undone."""


async def _understood(work: Callable[[], Awaitable[T]]) -> T:
    try:
        return await work()
    except asyncpg.UniqueViolationError as error:
        raise Conflict(str(error)) from error
    except _GONE as error:
        raise DatabaseUnavailable(f"PostgreSQL does not answer: {error}") from error
    except asyncpg.InterfaceError as error:
        raise DatabaseUnavailable(f"PostgreSQL does not answer: {error}") from error
    except asyncpg.PostgresError as error:
        raise DatabaseError(f"PostgreSQL: {error}") from error
