"""Who may do what: tokens, tenants, web pages, images, the host, the audit log."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from hermitcrab import cli
from hermitcrab.cli import exits
from tests.gateway.running import PATIENCE, SOURCE, Running, created, gateway, gauge, make_token, run

SECRET = "swordfish-in-a-command"
TLS = ("--listen", "127.0.0.1:0", "--tls-certificate", "hermitcrab.toml", "--tls-key", "hermitcrab.toml")
KEY = {"x-idempotency-key": "the-same"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    state = tmp_path_factory.mktemp("gateway")
    make_token(state, "nobody")
    with gateway(state, "--engine", "bubblewrap") as running:
        yield running


@pytest.fixture(scope="module")
def ours(server: Running) -> Iterator[httpx.Client]:
    with server.client(server.token("ours")) as client:
        yield client


@pytest.fixture(scope="module")
def theirs(server: Running) -> Iterator[httpx.Client]:
    with server.client(server.token("theirs")) as client:
        yield client


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer x", "Basic eDp5", "bearer hct_000000000000_" + "a" * 43, "Bearer \xff"],
)
def test_a_bad_token_is_told_nothing(server: Running, header: str) -> None:
    with server.client() as client:
        sent = [(b"authorization", header.encode("latin-1"))] if header else []
        for path in ("/v1/sandboxes", "/v1/sandboxes/x/execs/y", "/v1/nothing", "/metrics"):
            answer = client.get(path, headers=sent)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert answer.json() == {"error": "A valid bearer token is needed.", "code": "unauthorized"}
        assert client.get("/healthz").status_code == 200
        with pytest.raises(InvalidStatus, match="401"):
            connect(server.url.replace("http", "ws") + "/v1/sandboxes/x/terminal")


def probes(sandbox: str, exec_id: str) -> list[tuple[str, str, dict[str, Any]]]:
    at = f"/v1/sandboxes/{sandbox}"
    start = {"execId": exec_id, "command": "touch /workspace/probed", "timeoutMs": 1000}
    return [
        ("GET", at, {}),
        ("GET", f"{at}/execs", {}),
        ("POST", f"{at}/execs", {"json": start}),
        ("GET", f"{at}/execs/{exec_id}", {}),
        ("POST", f"{at}/execs/{exec_id}/cancel", {"json": {}}),
        ("GET", f"{at}/execs/{exec_id}/output", {}),
        ("GET", f"{at}/execs/{exec_id}/events", {}),
        ("GET", f"{at}/files", {"params": {"path": "secret"}}),
        ("PUT", f"{at}/files", {"params": {"path": "secret"}, "content": b"changed"}),
        ("DELETE", f"{at}/files", {"params": {"path": "secret"}}),
        ("GET", f"{at}/files/list", {}),
        ("POST", f"{at}/snapshot", {}),
        ("POST", f"{at}/fork", {"json": {}}),
        ("POST", f"{at}/network", {"json": {"allowed": True}}),
        ("POST", f"{at}/terminate", {"json": {}}),
    ]


def test_anothers_sandbox_does_not_exist(server: Running, ours: httpx.Client, theirs: httpx.Client) -> None:
    sandbox = created(ours)
    run(ours, sandbox, "echo mine > secret")
    exec_id = run(ours, sandbox, "sleep 1000", wait=0)["execId"]
    unknown = "sb-" + "0" * (len(sandbox) - 3)
    for mine, nothing in zip(probes(sandbox, exec_id), probes(unknown, exec_id), strict=True):
        answers = [theirs.request(method, url, **body) for method, url, body in (mine, nothing)]
        told = [(each.status_code, each.text, set(each.headers)) for each in answers]
        assert told[0] == told[1], mine
        assert answers[0].status_code == 404, mine
    with pytest.raises(InvalidStatus, match="404"):
        connect(
            server.url.replace("http", "ws") + f"/v1/sandboxes/{sandbox}/terminal",
            additional_headers={"authorization": theirs.headers["authorization"]},
        )
    assert theirs.get("/v1/sandboxes").json() == {"sandboxes": []}
    assert ours.get(f"/v1/sandboxes/{sandbox}/execs/{exec_id}").json()["status"] == "running"
    assert run(ours, sandbox, "cat secret; ls")["output"] == "mine\nsecret\n"


def test_the_same_key_of_two_tenants_makes_two(ours: httpx.Client, theirs: httpx.Client) -> None:
    answers = [each.post("/v1/sandboxes", json={}, headers=KEY).json() for each in (ours, theirs, ours)]
    assert answers[0]["id"] == answers[2]["id"] != answers[1]["id"]
    assert [each["tenant"] for each in answers] == ["ours", "theirs", "ours"]


def test_an_operator_sees_all_and_nobody_else_does(server: Running, ours: httpx.Client) -> None:
    id = created(ours)
    for url in ("/metrics", "/v1/sandboxes?all=true"):
        assert ours.get(url).status_code == 403
    with server.client(server.token("watch", operator=True)) as operator:
        assert 'tenant="ours"' in operator.get("/metrics").text
        assert id in {each["id"] for each in operator.get("/v1/sandboxes?all=true").json()["sandboxes"]}
        assert operator.get(f"/v1/sandboxes/{id}").status_code == 404


@pytest.mark.parametrize("path", ["../../etc/passwd", "/workspace/../etc/passwd", "a/../../b", "..", "a\0b"])
def test_a_path_with_a_way_upwards_is_refused(ours: httpx.Client, path: str) -> None:
    key = {"x-idempotency-key": "paths"}
    url = f"/v1/sandboxes/{ours.post('/v1/sandboxes', json={}, headers=key).json()['id']}/files"
    for answer in (
        ours.get(url, params={"path": path}),
        ours.put(url, params={"path": path}, content=b"x"),
        ours.delete(url, params={"path": path, "recursive": True}),
        ours.get(f"{url}/list", params={"path": path}),
    ):
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_path")


def test_ids_are_no_paths(ours: httpx.Client) -> None:
    for id in ("..", "%2e%2e", "..%2f..%2fetc", "%00", "x" * 5000, "-", "%ff", "a%0d%0ab"):
        for rest in ("", "/execs", "/files?path=x", "/execs/%2e%2e%2f"):
            assert ours.get(f"/v1/sandboxes/{id}{rest}").status_code in (404, 405)


def test_tokens_are_made_listed_and_revoked_while_it_runs(server: Running) -> None:
    def token(*arguments: str) -> str:
        argv = [sys.executable, "-m", "hermitcrab.cli", "token", *arguments, "--state", str(server.state)]
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout

    made = json.loads(token("create", "laptop", "--tenant", "acme", "--json"))
    with server.client(made["token"]) as client:
        sandbox = created(client)
        exec_id = run(client, sandbox, "sleep 1000", wait=0)["execId"]
        at = f"/v1/sandboxes/{sandbox}"
        known = {"authorization": f"Bearer {made['token']}"}
        with (
            ThreadPoolExecutor() as beside,
            client.stream("GET", f"{at}/execs/{exec_id}/events") as events,
            connect(f"{server.url.replace('http', 'ws')}{at}/terminal", additional_headers=known) as terminal,
        ):
            polling = beside.submit(client.get, f"{at}/execs/{exec_id}", params={"wait": 3})
            token("revoke", made["id"])
            with pytest.raises(httpx.RemoteProtocolError):
                events.read()
            with pytest.raises(ConnectionClosed, match="1008"):
                list(iter(terminal.recv, None))
            assert polling.result().status_code == 401
        assert client.get("/v1/sandboxes").status_code == 401
    (row,) = [each for each in json.loads(token("ls", "--json")) if each["id"] == made["id"]]
    assert (row["name"], row["tenant"], bool(row["used"]), bool(row["revoked"])) == (
        *("laptop", "acme"),
        *(True, True),
    )
    assert made["token"] not in token("ls")


def test_the_audit_log_says_who_and_how_it_ended_and_no_secret(server: Running) -> None:
    text = server.token("audited")
    with server.client(text) as client:
        id = created(client)
        run(client, id, f"echo {SECRET}; cat; exit 9", stdinData=SECRET)
        client.put(f"/v1/sandboxes/{id}/files", params={"path": "f"}, content=SECRET.encode())
        client.post(f"/v1/sandboxes/{id}/terminate", json={})
    mine = [each for each in server.audit if each.get("tenant") == "audited"]
    assert [each["what"] for each in mine if each["what"] != "sandbox.end"] == [
        *("sandbox.create", "exec.start", "exec.end", "file.write", "sandbox.terminate"),
    ]
    assert mine[2]["returncode"] == 9
    assert (mine[1]["token"], mine[1]["address"], len(mine[1]["sha256"])) == ("test", "127.0.0.1", 64)
    for path in (server.state / "audit.jsonl", *server.state.glob("gateway.db*")):
        content = path.read_bytes()
        assert text.encode() not in content, path
        assert path.stat().st_mode & 0o077 == 0, path
    assert SECRET not in (server.state / "audit.jsonl").read_text()
    assert SECRET not in server.output


def test_the_audit_log_tells_programs_apart_whatever_they_are_called(server: Running) -> None:
    with server.client(server.token("calling")) as client:
        id = created(client)
        for word in ("one", "other", "one"):
            run(client, id, "innocent", program={"argv": ["echo", word]})
        client.post(f"/v1/sandboxes/{id}/terminate", json={})
    first, second, third = (
        each["sha256"]
        for each in server.audit
        if each.get("tenant") == "calling" and each["what"] == "exec.start"
    )
    assert first == third
    assert first != second


def test_without_tokens_only_this_machines_programs_are_welcome(tmp_path: Path) -> None:
    with gateway(tmp_path, "--engine", "bubblewrap") as server, server.client() as client:
        assert "no tokens" in server.output
        assert client.get("/v1/sandboxes").status_code == 200
        for headers in (
            {"host": "evil.example:8720"},
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"origin": "null"},
        ):
            answer = client.post("/v1/sandboxes", json={}, headers=headers)
            assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
        assert client.get("/v1/sandboxes", headers={"x-forwarded-for": "203.0.113.9"}).status_code == 401
        own = {"origin": server.url, "sec-fetch-site": "same-origin"}
        assert client.get("/v1/sandboxes", headers=own).json() == {"sandboxes": []}
        token = server.token()
        deadline = time.monotonic() + PATIENCE
        while client.get("/v1/sandboxes").status_code == 200:
            assert time.monotonic() < deadline, "the first token closes the door"
        with server.client(token) as known:
            assert known.get("/v1/sandboxes").status_code == 200


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--engine", "bubblewrap", "--listen", "0.0.0.0:0"], "there are no tokens yet"),
        (["--engine", "local", "--listen", "0.0.0.0:0"], "--allow-unisolated"),
        (["--engine", "bubblewrap", "--listen", "127.0.0.1:99999"], "takes HOST:PORT"),
        (["--engine", "bubblewrap", "--listen", "203.0.113.7:1"], "Cannot assign requested address"),
        (["--engine", "bubblewrap", "--database", "mysql://x"], "postgresql"),
        (["--engine", "bubblewrap", "--set", "workspace"], "takes KEY=VALUE"),
        (["--config", "nothing.toml"], "nothing.toml: cannot be read"),
        (["--engine", "bubblewrap", *TLS], "do not make TLS"),
        ([], "serve needs an engine"),
    ],
)
def test_it_refuses_to_start(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A project's file and variables have no say in what others may do.
    (tmp_path / "hermitcrab.toml").write_text('default = "local"\n[session]\nnonsense = 1\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HERMITCRAB_ON", "local")
    assert cli.main(["serve", "--state", str(tmp_path / "state"), *arguments]) == exits.USAGE
    assert says in capsys.readouterr().err


def test_tls_and_a_file_of_settings(tmp_path: Path) -> None:
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
    ]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")]
    subprocess.run([*request, *names, *files], check=True, capture_output=True)
    config = tmp_path / "gateway.toml"
    config.write_text(
        '[server]\nlisten = "127.0.0.1:0"\ntls_certificate = "cert.pem"\ntls_key = "key.pem"\n'
        'audit_commands = true\nopen_metrics = true\ntokens = "required"\n'
        "[limits]\nsandboxes = 2\nqueue = 0\ncreations_per_minute = 3\n[engines.bubblewrap]\n"
        '[[pools]]\nengine = "bubblewrap"\nsize = 1\n'
    )
    state = tmp_path / "state"
    # Told by the file, and not by an argument.
    with gateway(state, "--config", str(config), "--listen", "127.0.0.1:0") as server:
        assert server.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with server.client(server.token(), verify=trust) as client:
            while not gauge(client, "hermitcrab_pool_ready"):
                time.sleep(0.01)
            id = created(client, cpu=1, memoryMiB=5120)
            assert gauge(client, "hermitcrab_pool_handed_out_total") == 1
            assert run(client, id, "echo over tls")["output"] == "over tls\n"
            again = {client.post("/v1/sandboxes", json={}, headers=KEY).json()["id"] for _ in range(5)}
            assert len(again) == 1, "to be told again costs nothing"
            for code in ("too_many_sandboxes", "too_many_requests"):
                full = client.post("/v1/sandboxes", json={})
                assert (full.status_code, full.json()["code"]) == (429, code)
                assert 1 <= int(full.headers["retry-after"]) <= 20
            del client.headers["authorization"]
            assert client.get("/v1/sandboxes").status_code == 401
            assert client.get("/metrics").status_code == 200
        assert [each["command"] for each in server.audit if each["what"] == "exec.start"] == ["echo over tls"]
