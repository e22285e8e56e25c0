"""The gateway's rows in a sqlite file, for one process.

Statements take microseconds, so they run on the loop's own thread. What waits for the disk, the checkpoint,
is done by another thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hermitcrab.gateway.database import Conflict, DatabaseError, DatabaseUnavailable, Row, Statement, newer

_BUSY_SECONDS = 0.5
"""How long another program, `hermitcrab token` say, may keep everybody here waiting."""
_OPENING_SECONDS = 10.0
_LOCK_SECONDS = 1.0
_PAGE = 4096
_PAGES_PER_CHECKPOINT = 2000
_LONGEST_LOG = 64 << 20
"""Bytes of the write-ahead log at which it is begun anew, which makes everybody wait once."""


class Sqlite:
    shared = False

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int | None) -> None:
        self._path, self._connection, self._lock = path, connection, lock
        self._pages = 0
        self._checkpoint: asyncio.Future[None] | None = None

    @classmethod
    def open(cls, path: Path, migrations: Sequence[str], *, alone: bool) -> Sqlite:
        try:
            path.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            lock = _locked(path) if alone else None
            # By ourselves, because sqlite would let others read it. Never when it is there: closing any
            # descriptor of a file ends the locks that this process has on it by another one.
            if not path.exists():
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise DatabaseError(f"{error.filename or path}: {error.strerror}") from error
        try:
            connection = sqlite3.connect(path, timeout=_OPENING_SECONDS, isolation_level=None)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # whole at any moment, and soon on the disk
            connection.execute("PRAGMA wal_autocheckpoint = 0")
            _upgrade(connection, path, migrations)
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_SECONDS * 1000:.0f}")
        except (sqlite3.Error, DatabaseError) as error:
            if lock is not None:
                os.close(lock)
            if isinstance(error, DatabaseError):
                raise
            raise DatabaseError(f"{path}: {error}") from error
        return cls(path, connection, lock)

    async def rows(self, sql: str, *values: Any) -> list[Row]:
        return self._execute(sql, values).fetchall()

    async def run(self, sql: str, *values: Any) -> int:
        changed = self._execute(sql, values).rowcount
        self._written((sql, values))
        return changed

    async def all_of(self, *statements: Statement) -> None:
        self._execute("BEGIN IMMEDIATE", ())
        try:
            for sql, values in statements:
                self._execute(sql, values)
        except BaseException:
            self._execute("ROLLBACK", ())
            raise
        self._execute("COMMIT", ())
        self._written(*statements)

    async def close(self) -> None:
        if self._checkpoint is not None:
            await asyncio.wait([self._checkpoint])
        self._connection.close()
        if self._lock is not None:
            os.close(self._lock)

    def _execute(self, sql: str, values: Sequence[Any]) -> sqlite3.Cursor:
        try:
            return self._connection.execute(sql, {str(n): value for n, value in enumerate(values, 1)})
        except sqlite3.IntegrityError as error:
            raise Conflict(str(error)) from error
        except sqlite3.OperationalError as error:
            raise DatabaseUnavailable(f"{self._path}: {error}") from error
        except sqlite3.Error as error:
            raise DatabaseError(f"{self._path}: {error}") from error

    def _written(self, *statements: Statement) -> None:
        self._pages += sum(_pages(values) for _, values in statements)
        if self._pages < _PAGES_PER_CHECKPOINT or (self._checkpoint and not self._checkpoint.done()):
            return
        self._pages = 0
        if _size(self._path.with_name(f"{self._path.name}-wal")) > _LONGEST_LOG:
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        else:
            self._checkpoint = asyncio.get_running_loop().run_in_executor(None, _checkpointed, self._path)


def _pages(values: Sequence[Any]) -> int:
    """About how many a statement wrote."""
    return 2 + sum(len(each) // _PAGE for each in values if isinstance(each, bytes))


def _checkpointed(path: Path) -> None:
    """Without making the writer wait."""
    try:
        with closing(sqlite3.connect(path, timeout=_OPENING_SECONDS)) as connection:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    except sqlite3.Error:
        pass  # the next one may do it


def _locked(path: Path) -> int:
    descriptor = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # A gateway that was just killed may have been about to start a program, which has the lock for a moment.
    deadline = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
    os.close(descriptor)
    raise DatabaseError(
        f"another gateway uses {path}. One process can; for several use PostgreSQL "
        "(database = postgresql://...), or give this one a state directory of its own"
    )


def _upgrade(connection: sqlite3.Connection, path: Path, migrations: Sequence[str]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute("COMMIT")
    if version > len(migrations):
        raise newer(str(path), version, len(migrations))
    for number in range(version, len(migrations)):
        steps = f"{migrations[number]}; PRAGMA user_version = {number + 1};"
        connection.executescript(f"BEGIN IMMEDIATE; {steps} COMMIT;")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
