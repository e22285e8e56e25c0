"""Clients that are slow, broken, greedy or malicious: refused, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings, strategies
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from starlette.types import Receive, Scope, Send

from hermitcrab.gateway import connections
from tests.gateway.running import PATIENCE, Running, created, gateway, gauge, run

LIMITS = {
    "sandboxes": 3,
    "execs": 2,
    "queue": 1,
    "queue_seconds": 0.3,
    "streams": 2,
    "request_bytes": 20_000,
    "file_bytes": 1_000_000,
    "output_bytes": 100_000,
}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = [word for key, value in LIMITS.items() for word in ("--limit", f"{key}={value}")]
    with gateway(tmp_path_factory.mktemp("gateway"), "--engine", "bubblewrap", *limits) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as one:
        yield one


@pytest.fixture(scope="module")
def sandbox(client: httpx.Client) -> str:
    return created(client)


def connected(server: Running) -> socket.socket:
    place = urlsplit(server.url)
    assert place.port is not None
    return socket.create_connection((place.hostname or "", place.port), PATIENCE)


def exec_body(**body: Any) -> dict[str, Any]:
    return {"execId": str(uuid.uuid4()), "command": "touch /workspace/changed", "timeoutMs": 1000, **body}


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"[]", b"null", b"nope", b'"x"', b"\xff\xfe", b"{}", b'{"execId": 5, "command": "x"}'),
        *(b"[" * 15_000, b'{"a":' * 3_000, b'{"execId": "a/b", "command": "x"}'),
        *(b'{"execId": "a", "command": "x\\u0000y"}', b'{"execId": "a", "command": "\\ud800"}'),
        *(
            b'{"execId": "a", "command": "x", "timeoutMs": -1}',
            b'{"execId": "a", "command": "x", "timeoutMs": 1e400}',
        ),
        *(b'{"execId": "a", "command": "x", "stdinBase64": "!"}', b'{"execId": "", "command": "x"}'),
    ],
)
def test_a_body_that_makes_no_sense(client: httpx.Client, sandbox: str, content: bytes) -> None:
    before = client.get(f"/v1/sandboxes/{sandbox}/execs").json()
    answer = client.post(f"/v1/sandboxes/{sandbox}/execs", content=content, headers=JSON)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request"), answer.text
    assert client.get(f"/v1/sandboxes/{sandbox}/execs").json() == before


@pytest.mark.parametrize(
    "body",
    [
        *(
            {"cpu": 0},
            {"cpu": "much"},
            {"memoryMiB": -5},
            {"timeoutMs": 0},
            {"cwd": "a\0b"},
            {"cwd": "x" * 5000},
        ),
        *({"persistentFilesystem": 7}, {"image": ["a"]}, {"logicalKey": "x" * 300}, {"network": "perhaps"}),
    ],
)
def test_a_create_that_makes_no_sense(client: httpx.Client, body: dict[str, Any]) -> None:
    answer = client.post("/v1/sandboxes", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request"), answer.text
    assert next(iter(body)) in answer.json()["error"], "it says which field"


def test_a_body_that_is_too_large_or_of_another_kind(client: httpx.Client, sandbox: str) -> None:
    url = f"/v1/sandboxes/{sandbox}"
    large = json.dumps(exec_body(stdinData="x" * 30_000)).encode()
    pieces = (large[at : at + 1000] for at in range(0, len(large), 1000))
    refused = [
        client.post(f"{url}/execs", content=large, headers=JSON),
        client.post(f"{url}/execs", content=pieces, headers=JSON),
        client.post("/v1/sandboxes", content=b" " * 30_000, headers=JSON),
        client.put(f"{url}/files", params={"path": "big"}, content=b"x" * 1_000_001),
        client.put(f"{url}/files", params={"path": "big"}, content=(b"x" * 10_000 for _ in range(101))),
    ]
    assert {(each.status_code, each.json()["code"]) for each in refused} == {(413, "too_large")}
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"content-type": kind} if kind else {}
        for path, body in ((f"{url}/execs", exec_body()), ("/v1/sandboxes", {}), (f"{url}/fork", {})):
            answer = client.post(path, content=json.dumps(body), headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (415, "not_json")
    assert run(client, sandbox, "ls")["output"] == ""


def test_half_a_request_stalls_nobody(server: Running, client: httpx.Client, sandbox: str) -> None:
    """Many connections with half a head, half a body, or nonsense; everybody else is served at once."""
    halves = (
        b"",
        b"POST /v1/sandboxes HTTP/1.1\r\nhost: 127.0",
        b"POST /v1/sandboxes HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{",
    )
    slow = [connected(server) for _ in range(60)]
    for number, each in enumerate(slow):
        each.sendall(halves[number % len(halves)])
    began = time.monotonic()
    assert run(client, sandbox, "echo served")["output"] == "served\n"
    assert time.monotonic() - began < 5
    for nonsense in (b"\x16\x03\x01\x02", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\ncontent-length: x\r\n\r\n"):
        with closing(connected(server)) as broken:
            broken.sendall(nonsense)
            answer = received(broken)
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "bad_http"
    with closing(connected(server)) as huge:
        huge.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000)
        assert received(huge).startswith(b"HTTP/1.1 431 ")
    for each in slow:
        each.close()
    created_since = client.get("/v1/sandboxes").json()["sandboxes"]
    assert [each["id"] for each in created_since] == [sandbox]


def received(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def test_a_request_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.1)
    monkeypatch.setattr(connections, "BODY_SECONDS", 0.1)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n"

    async def scene() -> None:
        async with listening(_echo) as port:
            for half in (b"", b"POST / HT", head, head + b"12345"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(half)
                answer = await asyncio.wait_for(reader.read(), PATIENCE)
                assert answer.startswith(b"HTTP/1.1 408 "), half
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for piece in (b"POST / HT", head[9:], b"1234567890", head + b"abcdefghij"):
                writer.write(piece)
                await asyncio.sleep(0.06)  # together longer than the limit, each within it
            answers = await asyncio.wait_for(reader.readuntil(b"abcdefghij"), PATIENCE)
            assert answers.count(b" 200 ") == 2
            writer.close()

    asyncio.run(scene())


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            headers = [(b"content-length", b"%d" % len(body))]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return


@asynccontextmanager
async def listening(app: Any) -> AsyncIterator[int]:
    config = uvicorn.Config(app, http=connections.Connection, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        try:
            yield listener.getsockname()[1]
        finally:
            await server.shutdown(sockets=[listener])


def test_clients_that_vanish_leave_nothing_open(server: Running, client: httpx.Client, sandbox: str) -> None:
    sleeping = run(client, sandbox, "sleep 1000", wait=0)["execId"]
    at = f"/v1/sandboxes/{sandbox}/execs/{sleeping}"
    for path in (f"{at}/events", f"{at}?wait=30", f"{at}/events"):
        with closing(connected(server)) as gone:
            gone.sendall(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            if "events" in path:
                assert gone.recv(100).startswith(b"HTTP/1.1 200")
    deadline = time.monotonic() + PATIENCE
    while gauge(client, "hermitcrab_tenant_streams") != 0:
        assert time.monotonic() < deadline
    with client.stream("GET", f"{at}/events"), client.stream("GET", f"{at}/events"):
        third = client.get(f"{at}/events")
        assert (third.status_code, third.json()["code"]) == (429, "too_many_streams")
    assert client.post(f"{at}/cancel", json={}).json()["status"] == "cancelled"


def test_commands_beyond_the_limit_wait_and_then_are_refused(client: httpx.Client, sandbox: str) -> None:
    hold = "until [ -e enough ]; do sleep 0.02; done"
    first, second = (run(client, sandbox, hold, wait=0) for _ in range(2))
    third = run(client, sandbox, "echo third", wait=0)
    assert [each["status"] for each in (first, second, third)] == ["running", "running", "queued"]
    refused = client.post(f"/v1/sandboxes/{sandbox}/execs", json=exec_body())
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_execs")
    assert int(refused.headers["retry-after"]) >= 1
    assert client.put(f"/v1/sandboxes/{sandbox}/files", params={"path": "enough"}).status_code == 200
    done = client.get(f"/v1/sandboxes/{sandbox}/execs/{third['execId']}", params={"wait": 20}).json()
    assert (done["status"], done["output"]) == ("completed", "third\n")
    assert run(client, sandbox, "ls")["output"] == "enough\n", "what was refused did not run"
    client.delete(f"/v1/sandboxes/{sandbox}/files", params={"path": "enough"})


def test_sandboxes_beyond_the_limit_wait_and_then_are_refused(client: httpx.Client, sandbox: str) -> None:
    others = [created(client) for _ in range(2)]
    began = time.monotonic()
    refused = client.post("/v1/sandboxes", json={})
    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_sandboxes")
    assert time.monotonic() - began >= 0.3, "it waited for a place"
    for each in others:
        client.post(f"/v1/sandboxes/{each}/terminate", json={})
    assert client.post(f"/v1/sandboxes/{created(client)}/terminate", json={}).status_code == 200
    assert gauge(client, "hermitcrab_tenant_sandboxes") == 1


def test_output_beyond_the_limit_keeps_the_last_of_it(client: httpx.Client, sandbox: str) -> None:
    done = run(client, sandbox, "seq 100000")
    assert done["outputBytes"] == 588_895
    assert len(done["output"]) <= 100_000
    assert done["output"].endswith("\n99999\n100000\n")


ENDING = ("/terminate", "/fork", "/snapshot")
"""What must not be done to the sandbox that all of them share."""


@pytest.mark.parametrize("examples", [8, pytest.param(150, marks=pytest.mark.thorough)])
def test_no_request_that_the_description_allows_or_forbids_breaks_it(
    server: Running, sandbox: str, examples: int
) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations: list[Any] = [each.ok() for each in schema.get_all_operations() if isinstance(each, Ok)]
    met: Counter[int] = Counter()
    for operation in operations:
        if not operation.path.endswith("/events"):  # those end with their command
            _attempts(operation, sandbox, examples, met)()
    assert len(operations) >= 15
    assert min(met[200], met[400], met[404]) > 5, met


def _attempts(operation: Any, sandbox: str, examples: int, met: Counter[int]) -> Any:
    allowed, forbidden = (operation.as_strategy(generation_mode=mode) for mode in GenerationMode)
    usual = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )

    @usual
    @given(case=allowed | forbidden, real=strategies.booleans())
    def attempt(case: Any, real: bool) -> None:
        # Of itself it would never guess the id of a sandbox.
        if "sandbox_id" in case.path_parameters and real and not operation.path.endswith(ENDING):
            case.path_parameters["sandbox_id"] = sandbox
        case.headers.pop("Authorization", None)  # a guess, which would be refused at the door
        answer = case.call(timeout=PATIENCE)
        met[answer.status_code] += 1
        # 501 says that this engine cannot, which is an answer.
        assert answer.status_code < 500 or answer.status_code == 501, (operation.label, answer.text)
        if answer.status_code >= 400:
            assert set(answer.json()) >= {"error", "code"}

    return attempt
