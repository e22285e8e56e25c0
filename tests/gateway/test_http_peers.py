"""Two gateways on one PostgreSQL: either serves the sandboxes of both."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg  # type: ignore[import-untyped]
import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from hermitcrab.gateway import tokens
from hermitcrab.gateway.database import open_database
from hermitcrab.gateway.tables import MIGRATIONS
from tests.conftest import required
from tests.gateway.running import PATIENCE, Running, created, gateway, run

VARIABLE = "HERMITCRAB_TEST_POSTGRES"


@pytest.fixture
def database() -> Iterator[str]:
    """A database of the test's own."""
    server = os.environ.get(VARIABLE, "")
    if not server:
        if "postgres" in required():
            pytest.fail(f"required, but {VARIABLE} is not set")
        pytest.skip("scripts/with-engines starts a PostgreSQL for it")
    name = f"http_{secrets.token_hex(6)}"
    asyncio.run(told(server, f"CREATE DATABASE {name}"))
    try:
        yield urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
    finally:
        asyncio.run(told(server, f"DROP DATABASE {name} WITH (FORCE)"))


async def told(server: str, sql: str) -> None:
    connection = await asyncpg.connect(server)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()


async def token(database: str, tenant: str) -> str:
    rows = await open_database(database, Path(), MIGRATIONS)
    try:
        return (await tokens.create(rows, tenant=tenant, name="test"))[1]
    finally:
        await rows.close()


def arguments(database: str) -> tuple[str, ...]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    return "--engine", "bubblewrap", "--database", database, "--listen", place, "--url", f"http://{place}"


def test_a_request_finds_its_way(database: str, tmp_path: Path) -> None:
    ours, theirs = (asyncio.run(token(database, tenant)) for tenant in ("ours", "theirs"))
    place = arguments(database)
    with (
        gateway(tmp_path / "a", *place) as first,
        gateway(tmp_path / "b", *arguments(database)) as second,
        first.client(ours) as holder,
        second.client(ours) as other,
        second.client(theirs) as stranger,
    ):
        sandbox = created(holder)
        at = f"/v1/sandboxes/{sandbox}"
        assert run(other, sandbox, "cat; exit 3", stdinData="x" * 100_000)["returncode"] == 3
        key = {"x-idempotency-key": "the-same"}
        ids = {each.post("/v1/sandboxes", json={}, headers=key).json()["id"] for each in (holder, other)}
        assert len(ids) == 1

        live = run(other, sandbox, "echo one; until [ -e go ]; do sleep 0.02; done", wait=0)["execId"]
        with other.stream("GET", f"{at}/execs/{live}/events") as events:
            lines = events.iter_lines()
            assert next(lines) == "event: output"
            other.put(f"{at}/files", params={"path": "go"}, content=b"")
            assert "event: end" in list(lines)
        data = bytes(range(256)) * 8_000
        assert other.put(f"{at}/files", params={"path": "data"}, content=data).status_code == 200
        got = other.get(f"{at}/files", params={"path": "data"})
        assert (got.content, got.headers["x-hermitcrab-gateway"]) == (data, "1")
        terminal(second, sandbox, ours)

        for path in (at, f"{at}/execs", f"{at}/files?path=data"):
            assert stranger.get(path).text == stranger.get(path.replace(sandbox, "sb-0")).text
        with pytest.raises(InvalidStatus, match="404"):
            terminal(second, sandbox, theirs)
        lonely(first, other, at)
        with gateway(tmp_path / "a", *place):  # at the same address: what was there is its own at once
            assert run(other, sandbox, "wc -c <data")["output"] == f"{len(data)}\n"
            assert {each["state"] for each in other.get("/v1/sandboxes").json()["sandboxes"]} == {"ready"}


def terminal(server: Running, sandbox: str, token: str) -> None:
    url = server.url.replace("http", "ws") + f"/v1/sandboxes/{sandbox}/terminal"
    with connect(url, additional_headers={"authorization": f"Bearer {token}"}, compression=None) as socket:
        socket.send(b"echo $((6*7))-; exit 4\n")
        messages = list(socket)
    assert b"42-" in b"".join(each for each in messages if isinstance(each, bytes))
    assert json.loads(str(messages[-1])) == {"exit": 4}


def lonely(first: Running, other: httpx.Client, at: str) -> None:
    """A gateway that died a moment ago: its sandboxes are not lost, and asked for again soon."""
    first.process.kill()
    first.process.wait(PATIENCE)
    answer = other.get(f"{at}/execs")
    assert (answer.status_code, answer.json()["code"]) == (503, "gateway_unreachable")
    assert int(answer.headers["retry-after"]) >= 1
