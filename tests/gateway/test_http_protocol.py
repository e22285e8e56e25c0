"""The calls, as a client sends them to a gateway that really listens."""

from __future__ import annotations

import base64
import hashlib
import json
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.gateway.running import PATIENCE, Running, created, gateway, gauge, run

ENGINE = ("--engine", "bubblewrap")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with gateway(tmp_path_factory.mktemp("gateway"), *ENGINE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as one:
        yield one


@pytest.fixture(scope="module")
def sandbox(client: httpx.Client) -> str:
    return created(client)


def execs(sandbox: str, *more: str) -> str:
    return "/".join(("/v1/sandboxes", sandbox, "execs", *more))


def test_the_five_calls_of_an_old_client(client: httpx.Client) -> None:
    body = {
        "image": "python:3.11",
        "cwd": "/tmp",
        "cpu": 1,
        "memoryMiB": 5120,
        "timeoutMs": 3_600_000,
        "idleTimeoutMs": 300_000,
        "persistentFilesystem": False,
        "logicalKey": "task",
    }
    answer = client.post("/v1/sandboxes", json=body, headers={"x-idempotency-key": str(uuid.uuid4())})
    assert answer.headers["x-hermitcrab-gateway"] == "1"
    id = answer.json()["id"]
    exec_id = str(uuid.uuid4())
    command = {"execId": exec_id, "command": "pwd; cat; echo no >&2; exit 7", "timeoutMs": 10_000}
    started = client.post(execs(id), json={**command, "stdinData": "in\n"}).json()
    assert started["execId"] == exec_id
    while started["status"] in ("queued", "running"):
        started = client.get(execs(id, exec_id)).json()
    assert (started["status"], started["output"], started["returncode"]) == ("completed", "/tmp\nin\nno\n", 7)

    sleeping = run(client, id, "sleep 1000 & setsid sleep 1000 & wait", wait=0, cwd="/")
    ended = client.post(execs(id, sleeping["execId"], "cancel"), json={}).json()
    assert (ended["status"], ended["returncode"]) == ("cancelled", 130)
    assert "sleep 1000" not in run(client, id, "ps -ef")["output"], "its processes are really gone"
    late = run(client, id, "echo so far; sleep 1000", timeoutMs=300)
    assert (late["status"], late["returncode"], "so far" in late["output"]) == ("timeout", 124, True)
    assert client.get(execs(id, "unknown")).status_code == 404

    for _ in range(2):
        answer = client.post(f"/v1/sandboxes/{id}/terminate", json={"snapshotBeforeTerminate": False})
        assert (answer.status_code, answer.json()["state"]) == (200, "ended")
    refused = client.post(execs(id), json={"execId": "late", "command": "true", "timeoutMs": 1000})
    assert 400 <= refused.status_code < 500
    assert set(refused.json()) >= {"error", "code"}


def test_a_key_makes_one_sandbox_also_when_requests_race(client: httpx.Client) -> None:
    key = {"x-idempotency-key": str(uuid.uuid4())}

    def create(_: int) -> Any:
        return client.post("/v1/sandboxes", json={}, headers=key).json()["id"]

    with ThreadPoolExecutor(8) as crowd:
        assert len(set(crowd.map(create, range(8)))) == 1


def test_an_exec_id_runs_once(client: httpx.Client, sandbox: str) -> None:
    body = {
        "execId": str(uuid.uuid4()),
        "command": "echo ran >> once; sleep 0.2; cat once",
        "timeoutMs": 9000,
    }

    def start(_: int) -> Any:
        return client.post(execs(sandbox), json=body, params={"wait": 10}).json()

    with ThreadPoolExecutor(6) as crowd:
        answers = list(crowd.map(start, range(6)))
    assert {(each["status"], each["output"]) for each in answers} == {("completed", "ran\n")}
    other = client.post(execs(sandbox), json={**body, "command": "echo other"})
    assert other.status_code == 409


def test_a_long_poll_answers_at_the_end_and_not_before_it(client: httpx.Client, sandbox: str) -> None:
    began = time.monotonic()
    slow = run(client, sandbox, "sleep 0.5; echo done", wait=0.1)
    assert slow["status"] == "running"
    done = client.get(execs(sandbox, slow["execId"]), params={"wait": 20}).json()
    assert (done["status"], done["output"]) == ("completed", "done\n")
    assert 0.5 <= time.monotonic() - began < 10


def test_output_is_live_and_goes_on_after_a_broken_connection(client: httpx.Client, sandbox: str) -> None:
    command = "printf 'one\\377'; until [ -e go ]; do sleep 0.05; done; printf two; rm go"
    exec_id = run(client, sandbox, command, wait=0)["execId"]
    url = execs(sandbox, exec_id, "events")
    with client.stream("GET", url) as first:
        assert first.headers["content-type"].startswith("text/event-stream")
        name, id, data = next(events(first))
        assert (name, base64.b64decode(data["data"])) == ("output", b"one\xff")
    run(client, sandbox, "touch go")
    with client.stream("GET", url, headers={"last-event-id": id}) as again:
        told = list(events(again))
    assert [(name, data.get("status") or base64.b64decode(data["data"])) for name, _, data in told] == [
        ("output", b"two"),
        ("end", "completed"),
    ]
    page = client.get(execs(sandbox, exec_id, "output"), params={"offset": 2, "limit": 3})
    assert (page.content, page.headers["x-offset"], page.headers["x-end"]) == (b"e\xfft", "2", "false")
    rest = client.get(execs(sandbox, exec_id, "output"), params={"offset": 5})
    assert (rest.content, rest.headers["x-end"]) == (b"wo", "true")
    listed = client.get(execs(sandbox)).json()["execs"]
    assert exec_id in {each["execId"] for each in listed}


def test_a_reader_that_stops_reading_stalls_nobody(
    client: httpx.Client, server: Running, sandbox: str
) -> None:
    loud = run(client, sandbox, "head -c 30000000 /dev/zero | tr '\\0' x; echo", wait=0)
    with server.client() as idle, idle.stream("GET", execs(sandbox, loud["execId"], "events")):
        done = client.get(execs(sandbox, loud["execId"]), params={"wait": 30}).json()
        assert (done["status"], done["outputBytes"]) == ("completed", 30_000_001)
        assert len(done["output"]) <= 16 << 20
        assert done["output"].endswith("x\n"), "the last of it is what is kept"


def events(answer: httpx.Response) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, id and data of each."""
    fields: dict[str, str] = {}
    for line in answer.iter_lines():
        key, colon, value = line.partition(": ")
        if colon:
            fields[key] = value
        elif fields:
            yield fields["event"], fields.get("id", ""), json.loads(fields["data"])
            fields = {}


def test_files_go_in_and_out_as_they_are(client: httpx.Client, sandbox: str) -> None:
    url = f"/v1/sandboxes/{sandbox}/files"
    content = bytes(range(256)) * 5000
    put = client.put(url, params={"path": "a/b/c.bin", "mode": "750"}, content=content)
    assert put.status_code == 200, put.text
    got = client.get(url, params={"path": "/workspace/a/b/c.bin"})
    assert (got.content, got.headers["x-mode"]) == (content, "750")
    assert run(client, sandbox, "stat -c %a,%s a/b/c.bin")["output"] == f"750,{len(content)}\n"
    (entry,) = client.get(f"{url}/list", params={"path": "a/b"}).json()["files"]
    assert (entry["name"], entry["kind"], entry["size"]) == ("c.bin", "file", len(content))

    def half() -> Iterator[bytes]:
        yield b"half of it"
        raise OSError("the client dies")

    with pytest.raises(OSError, match="dies"):
        client.put(url, params={"path": "a/b/c.bin"}, content=half())
    assert client.get(url, params={"path": "a/b/c.bin"}).content == content
    assert client.get(url, params={"path": "a"}).status_code == 409
    assert client.delete(url, params={"path": "a"}).status_code == 409
    assert client.delete(url, params={"path": "a", "recursive": True}).status_code == 200
    unreadable = client.get(url, params={"path": "/proc/self/mem"})
    assert (unreadable.status_code, unreadable.json()["code"]) == (409, "file_error")
    missing = client.get(url, params={"path": "a/b/c.bin"})
    assert (missing.status_code, missing.json()["code"]) == (404, "no_such_file")


def test_stdin_of_any_bytes(client: httpx.Client, sandbox: str) -> None:
    data = bytes(range(256)) * 2000
    answer = run(client, sandbox, "sha256sum; wc -c", stdinBase64=base64.b64encode(data).decode())
    assert answer["output"].split()[0] == hashlib.sha256(data).hexdigest()


def coded(**texts: str) -> dict[str, str]:
    return {name.lstrip("_"): base64.b64encode(text.encode()).decode() for name, text in texts.items()}


def program(client: httpx.Client, sandbox: str, script: str, wait: float = 20, **more: Any) -> dict[str, Any]:
    exactly = {"argv": ["crab", "-c", script], "path": "/bin/bash", "env": ["A=b c"], **more}
    return run(client, sandbox, "a program", wait, program=exactly)


def test_a_program_has_exactly_what_it_is_given(client: httpx.Client, sandbox: str) -> None:
    script = "cat; cat <&7; /usr/bin/env; echo $0; printf 'a\\0b' >&9; echo last >&8; exit 3"
    ended = program(client, sandbox, script, given=coded(_0="in\n", _7="seven\n"), told=[8, 9])
    assert (ended["status"], ended["returncode"]) == ("completed", 3)
    said = ended["output"].splitlines()
    assert said[:2] == ["in", "seven"]
    assert "A=b c" in said
    assert not [each for each in said if each.startswith(("HOME=", "PATH="))]
    assert said[-1] == "crab"
    assert ended["told"] == coded(_8="last\n", _9="a\0b")
    assert client.get(execs(sandbox, ended["execId"])).json() == ended, "as the database has it"

    large = program(
        client, sandbox, "cat; cat <&7 >&8", given=coded(_0="x" * 9, _7="y" * 2_000_000), told=[8]
    )
    assert (large["output"], large["told"]) == ("x" * 9, coded(_8="y" * 2_000_000))
    missing = program(client, sandbox, "true", path="/no/such")
    assert (missing["status"], missing["returncode"], missing["output"]) == ("completed", 127, "")
    assert "/no/such" in missing["reason"]
    wrongs: list[dict[str, Any]] = [
        {"given": {"1": ""}},
        {"told": [0]},
        {"given": {"7": ""}, "told": [7]},
        {"env": ["A"]},
        {"argv": []},
    ]
    for wrong in wrongs:
        body = {"execId": "wrong", "command": "", "program": {"argv": ["true"], **wrong}}
        assert client.post(execs(sandbox), json=body).status_code == 400, wrong


def test_what_a_command_has_used(client: httpx.Client, sandbox: str) -> None:
    ended = run(client, sandbox, "i=0; while ((i++ < 100000)); do :; done; exit 4")
    assert 0.01 < ended["usage"]["userSeconds"] < 60
    assert 0 <= ended["usage"]["systemSeconds"] < 60
    assert 1 << 20 <= ended["usage"]["peakMemoryBytes"] < 1 << 30
    assert "outOfMemory" not in ended
    assert client.get(execs(sandbox, ended["execId"])).json() == ended, "as the database has it"


def test_a_signal_goes_to_what_a_command_started(client: httpx.Client, sandbox: str) -> None:
    script = "trap 'echo heard; exit 5' USR1; echo up; while :; do sleep 0.02; done"
    started = program(client, sandbox, script, wait=0)
    while not client.get(execs(sandbox, started["execId"], "output")).content:
        pass
    assert client.post(execs(sandbox, started["execId"], "signal"), json={"signal": 65}).status_code == 400
    assert client.post(execs(sandbox, "unknown", "signal"), json={"signal": 10}).status_code == 404
    client.post(execs(sandbox, started["execId"], "signal"), json={"signal": 10}).raise_for_status()
    ended = client.get(execs(sandbox, started["execId"]), params={"wait": 20}).json()
    assert (ended["output"].splitlines()[-1], ended["returncode"]) == ("heard", 5)
    late = client.post(execs(sandbox, started["execId"], "signal"), json={"signal": 10})
    assert late.json() == ended, "it is over"


def test_what_a_program_told_is_not_lost_with_the_gateway(tmp_path: Path) -> None:
    go = tmp_path / "go"
    script = (
        f"echo before >&8; until [ -e {go} ]; do sleep 0.02; done; echo after >&8; yes | head -c 900000 >&9"
    )
    server = Running(tmp_path / "gateway", "--engine", "local")
    try:
        with server.client() as client:
            box = created(client)
            id = program(client, box, f"PATH=/usr/bin:/bin; {script}", wait=0, told=[8, 9])["execId"]
    finally:
        server.end(signal.SIGKILL)
    go.touch()
    with gateway(tmp_path / "gateway", "--engine", "local") as again, again.client() as client:
        ended = client.get(execs(box, id), params={"wait": 20}).json()
        assert ended["told"] == coded(_8="before\nafter\n", _9="y\n" * 450_000)
        client.post(f"/v1/sandboxes/{box}/terminate", json={})


def test_a_snapshot_a_fork_and_what_an_engine_cannot(client: httpx.Client) -> None:
    logical = {"persistentFilesystem": True, "logicalKey": str(uuid.uuid4())}
    first = created(client, **logical)
    run(client, first, "echo kept > file")
    (copy,) = client.post(f"/v1/sandboxes/{first}/fork", json={"count": 1}).json()["sandboxes"]
    assert copy["parent"] == first
    run(client, copy["id"], "echo copy > file")
    assert run(client, first, "cat file")["output"] == "kept\n"
    refused = client.post(f"/v1/sandboxes/{first}/network", json={"allowed": True})
    assert (refused.status_code, refused.json()["code"]) == (501, "unsupported")
    kept = client.post(f"/v1/sandboxes/{first}/snapshot").json()["snapshot"]
    assert kept in {each["id"] for each in client.get("/v1/snapshots").json()["snapshots"]}
    assert run(client, created(client, snapshot=kept), "cat file")["output"] == "kept\n"
    assert client.delete(f"/v1/snapshots/{kept}").status_code == 200
    assert client.post("/v1/sandboxes", json={"snapshot": kept}).status_code == 404
    client.post(f"/v1/sandboxes/{first}/terminate", json={"snapshotBeforeTerminate": True})
    assert run(client, created(client, **logical), "cat file")["output"] == "kept\n"


def test_a_terminal(server: Running, client: httpx.Client, sandbox: str) -> None:
    url = server.url.replace("http", "ws") + f"/v1/sandboxes/{sandbox}/terminal"
    with connect(f"{url}?rows=10&columns=33", compression=None) as terminal:
        terminal.send(b"stty size; echo $((6*7))-; tty\n")
        assert "42-" in shown(terminal, until="/dev/pts")
        terminal.send(json.dumps({"resize": [20, 44]}))
        terminal.send("nonsense is ignored")
        terminal.send(b"stty size\n")
        shown(terminal, until="20 44")
        terminal.send(b"exit 5\n")
        told = [message for message in terminal if isinstance(message, str)]
        assert list(map(json.loads, told)) == [{"exit": 5}]
    with pytest.raises(InvalidStatus, match="404"):
        connect(url.replace(sandbox, "sb-unknown"))


def shown(terminal: Connection, until: str) -> str:
    seen = ""
    while until not in seen:
        data = terminal.recv(PATIENCE)
        assert isinstance(data, bytes)
        seen += data.decode(errors="replace")
    return seen


def test_health_metrics_and_the_description(client: httpx.Client, sandbox: str) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    metrics = client.get("/metrics").text
    assert 'hermitcrab_sandboxes{state="ready"}' in metrics
    assert 'status="completed"' in metrics
    paths = client.get("/openapi.json").json()["paths"]
    assert "/v1/sandboxes/{sandbox_id}/execs/{exec_id}/events" in paths
    known = client.get("/v1/sandboxes").json()["sandboxes"]
    assert sandbox in {each["id"] for each in known}
    assert client.get(f"/v1/sandboxes/{sandbox}").json()["state"] == "ready"


def test_it_ends_orderly_and_leaves_nothing_or_everything(tmp_path: Path) -> None:
    """Ctrl-C ends the sandboxes, --keep leaves them with what runs in them for the next start."""
    with gateway(tmp_path, *ENGINE, "--keep") as first, first.client() as client:
        id = created(client)
        exec_id = run(client, id, "until [ -e go ]; do sleep 0.05; done; echo went on", wait=0)["execId"]
        with ThreadPoolExecutor(1) as crowd, client.stream("GET", execs(id, exec_id, "events")) as live:
            poll = crowd.submit(client.get, execs(id, exec_id), params={"wait": 30})
            while gauge(client, "hermitcrab_waiting") < 2:
                pass
            assert first.end(signal.SIGINT) == 0
            assert poll.result().json() == {"execId": exec_id, "status": "running"}
            with pytest.raises(httpx.RemoteProtocolError):
                live.read()
    with gateway(tmp_path, *ENGINE) as second, second.client() as client:
        run(client, id, "touch go")
        done = client.get(execs(id, exec_id), params={"wait": 20}).json()
        assert (done["status"], done["output"]) == ("completed", "went on\n"), done
        assert second.end(signal.SIGTERM) == 0
        last = second.audit[-1]
        assert (last["what"], last["sandbox"], last["state"]) == ("sandbox.end", id, "ended")
