"""A database of a test's own in the server of `scripts/engines/postgres`, and a way to it that can be cut."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg  # type: ignore[import-untyped]
import pytest

from tests.conftest import required
from tests.gateway.core_parts import ROOT

VARIABLE = "HERMITCRAB_TEST_POSTGRES"
_SCRIPT = ROOT / "scripts" / "engines" / "postgres"


def server_url() -> str:
    """Where the server is; the test is skipped when none runs."""
    if found := os.environ.get(VARIABLE):
        return found
    if "postgres" not in required() and subprocess.run([_SCRIPT, "status"], capture_output=True).returncode:
        pytest.skip("no PostgreSQL runs: scripts/engines/postgres up")
    said = subprocess.run([_SCRIPT, "env"], capture_output=True, text=True, check=True).stdout
    return said.partition("=")[2].strip()


@contextmanager
def database() -> Iterator[str]:
    """A new one, empty, for the length of the block."""
    server, name = server_url(), f"test_{secrets.token_hex(6)}"
    asyncio.run(_told(server, f"CREATE DATABASE {name}"))
    try:
        yield re.sub(r"/[^/?]*\?", f"/{name}?", server)
    finally:
        asyncio.run(_told(server, f"DROP DATABASE {name} WITH (FORCE)"))


async def _told(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


class Way:
    """A socket that leads to the server's, until it is cut."""

    def __init__(self, url: str) -> None:
        self._there = Path(urlsplit(url).query.partition("host=")[2]) / ".s.PGSQL.5432"
        self._directory = tempfile.TemporaryDirectory(prefix="hc-pg-")
        self._here = Path(self._directory.name) / ".s.PGSQL.5432"
        self.url = url.partition("host=")[0] + f"host={self._directory.name}"
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def mend(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._here)

    async def cut(self) -> None:
        """Nobody gets through any more, and whoever was through is not."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        self._here.unlink(missing_ok=True)
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        await self.cut()
        self._directory.cleanup()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            there_reader, there_writer = await asyncio.open_unix_connection(self._there)
            self._open |= {writer, there_writer}
            await asyncio.gather(_copied(reader, there_writer), _copied(there_reader, writer))
            self._open -= {writer, there_writer}
        finally:
            self._tasks.discard(task)


async def _copied(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        async for data in _pieces(source):
            target.write(data)
            await target.drain()
    target.close()


async def _pieces(source: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await source.read(1 << 16):
        yield data
