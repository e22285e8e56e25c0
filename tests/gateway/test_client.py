"""The client of a gateway: against a server that speaks the five fixed calls alone, and against ours."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hermitcrab
from hermitcrab.backends.clouds import retry
from hermitcrab.backends.gateway import execs, listing
from hermitcrab.backends.gateway.config import ManagedModalConfig
from hermitcrab.backends.gateway.events import Events
from hermitcrab.backends.gateway.http import CANCEL, CONNECT, POLL, seconds, words
from hermitcrab.cli import main
from hermitcrab.core.blocking.answer import Answer
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    SandboxLost,
    SandboxStartError,
    UnsupportedCapability,
)
from hermitcrab.result import INTERRUPTED, TIMED_OUT, Outcome
from tests.clouds import running
from tests.clouds.running import Cloud
from tests.gateway.running import gateway

START = r"POST /v1/sandboxes/\w+/execs$"
POLLS = r"GET /v1/sandboxes/\w+/execs/"
CREATE = r"POST /v1/sandboxes$"
MB = 1 << 20


@pytest.fixture
def cloud(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    found = running.cloud("five_calls")
    for name, value in found.variables.items():
        monkeypatch.setenv(name, value)
    found.calls(forget=True)
    yield found
    found.heal()
    assert found.boxes() == []


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "PAUSES", (0.01, 0.01, 0.01))


@pytest.fixture
def env(cloud: Cloud) -> Iterator[hermitcrab.Environment]:
    with hermitcrab.open("gateway") as opened:
        cloud.calls(forget=True)
        yield opened


class TestSettings:
    @pytest.mark.parametrize(
        ("kwargs", "expected"),
        [
            ({}, {"cpu": 1, "memoryMiB": 5120}),
            ({"cpu": "2.5", "memory": "2048"}, {"cpu": 2.5, "memoryMiB": 2048}),
            ({"memory": 1, "memoryMiB": 2.9}, {"cpu": 1, "memoryMiB": 2}),
            ({"ephemeral_disk": "4096", "diskMiB": 1}, {"cpu": 1, "memoryMiB": 5120, "diskMiB": 4096}),
            ({"cpu": "much", "memory": True, "diskMiB": -1}, {"cpu": 1, "memoryMiB": 5120}),
            ({"cpu": float("nan"), "memoryMiB": None, "memory": 64}, {"cpu": 1, "memoryMiB": 64}),
        ],
    )
    def test_resources(self, kwargs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
        assert ManagedModalConfig(modal_sandbox_kwargs=kwargs).resources == expected

    @pytest.mark.parametrize("setting", [CONNECT, POLL, CANCEL])
    def test_time_limits_come_from_variables(self, setting: tuple[str, float]) -> None:
        name, default = setting
        assert seconds({name: "2.5"}, setting) == 2.5
        for useless in ("", "soon", "0", "-1", "nan", "inf"):
            assert seconds({name: useless}, setting) == default
        assert seconds({}, setting) == default == (1.0 if setting is CONNECT else 5.0)

    @pytest.mark.parametrize("url", ["", "ftp://x", "127.0.0.1:80", "http://"])
    def test_an_address_that_is_none(self, url: str, quiet_home: Path) -> None:
        with pytest.raises(ConfigError, match="url"):
            hermitcrab.GatewayEnvironment(url)

    def test_nobody_listens(self, quiet_home: Path) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))  # and nobody can listen there meanwhile
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(BackendUnavailable, match="cannot be reached"):
                hermitcrab.GatewayEnvironment(url)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"error": "no room", "message": "m", "code": "full"}', "no room"),
        (b'{"error": "", "message": "no room", "code": "full"}', "no room"),
        (b'{"error": {"message": "no room"}}', "no room"),
        (b'{"error": null, "code": "full"}', "full"),
        (b'{"code": 17}', "17"),
        (b'{"other": 1}', '{"other": 1}'),
        (b"<h1>no\x1b room</h1>", "<h1>no  room</h1>"),
        (b"[1]", "[1]"),
        (b"", "HTTP 503"),
    ],
)
def test_which_words_an_error_is_told_with(body: bytes, told: str) -> None:
    assert words(httpx.Response(503, content=body)) == told


class TestAnswers:
    """What a call's output says, however it is cut into pieces."""

    @given(
        st.lists(st.integers(1, 60), max_size=12),
        st.binary(max_size=80).filter(lambda data: b"\0" not in data),
    )
    def test_in_pieces(self, cuts: list[int], printed: bytes) -> None:
        nonce = b"0123456789abcdef"
        quoted = b" $'b\\000' a\\ b '' ."
        said = b"noise" + nonce + b" begin\n" + printed + nonce + b" unheard of\n" + nonce[:9]
        said += nonce + b" end 3\nlate" + nonce + b" file 247 " + quoted + b"\n"
        said += nonce + b" last 247\n" + nonce + b" coded 1\nYQBi\nYw==\n" + nonce + b" decoded 1\n"
        said += nonce + b" done\n"
        answer, output, at = Answer(nonce), b"", 0
        for cut in [*cuts, len(said)]:
            output += b"".join(answer.feed(said[at : at + cut]))
            at += cut
        output += b"".join(answer.flush())
        # A word that we do not know is one that nobody said.
        assert output == printed + nonce[:9]
        assert (answer.complaint, answer.status, answer.done) == (b"noise", 3, True)
        assert answer.files == {247: b"b\0\0a b\0\0", 1: b"a\0bc"}

    def test_events(self) -> None:
        events = Events()
        said = b': hi\n\nevent: output\nid: 3\ndata: {"offset": 0}\n\nevent: end\ndata: {"a": "x: y"}\n\nev'
        found = [event for at in range(len(said)) for event in events.feed(said[at : at + 1])]
        assert found == [("output", {"offset": 0}), ("end", {"a": "x: y"})]


class TestFiveCalls:
    def test_a_session(self, cloud: Cloud) -> None:
        """The server refuses whatever is not among its calls."""
        env = hermitcrab.GatewayEnvironment(image="debian", cwd="/usr/new", cpu=2, memory=64, task_id="t")
        with env:
            assert cloud.box()["settings"] == {
                "image": "debian",
                "cwd": "/usr/new",
                "cpu": 2,
                "memoryMiB": 64,
                "timeoutMs": 3_600_000,
                "idleTimeoutMs": 300_000,
                "persistentFilesystem": False,
                "logicalKey": "t",
            }
            assert env.execute("pwd; v=$'a\\377\\n'; f() { echo \"$v\" | od -An -c; }").output == "/usr/new\n"
            assert "377" in env.execute("cd /; f").output
            started = time.monotonic()
            result = env.execute("sleep 60 & echo up; exit 3")
            assert (result.output, result.returncode) == ("up\n", 3)
            assert time.monotonic() - started < 30
            apart = env.execute("echo out; echo err >/dev/stderr; sleep 60 & cd /tmp", separate=True)
            assert (apart.stdout, apart.stderr, env.cwd) == ("out\n", "err\n", "/tmp")
            assert env.execute("echo so far; sleep 600", timeout=0.5).output.startswith(
                "so far\n[Command timed"
            )
            assert env.execute("kill -9 $PPID").returncode == 137

    def test_exact_bytes(self, env: hermitcrab.Environment) -> None:
        every = bytes(range(256))
        for data in (every, "ä\n".encode(), b"\0", os.urandom(100_000), os.urandom(5 * MB)):
            digest = hashlib.sha1(data).hexdigest()
            assert env.execute("sha1sum", stdin_data=data, timeout=60).output == f"{digest}  -\n"
            env.files.write("/tmp/copy", data)
            assert env.execute("sha1sum </tmp/copy").output == f"{digest}  -\n"
            assert env.files.read("/tmp/copy") == data
        long = "x" * MB
        assert env.execute(f"v={long}; echo ${{#v}}; unset v").output == f"{MB}\n"
        assert env.execute("ls -A /tmp").output == "copy\n"

    def test_what_it_cannot_do_is_refused_before_anything_runs(
        self, env: hermitcrab.Environment, cloud: Cloud
    ) -> None:
        with pytest.raises(UnsupportedCapability, match="terminals"):
            env.stream("true", terminal=(24, 80))
        with pytest.raises(UnsupportedCapability, match="stdin_data"):
            env.stream("cat", stdin=True)
        assert cloud.calls() == []
        process = env.start("cat; sleep 600")
        with pytest.raises(UnsupportedCapability, match="no input"):
            process.write("more")
        process.kill()
        assert process.wait(30).returncode == 137
        home = Path.home()
        (home / ".netrc").touch()
        with pytest.raises(UnsupportedCapability, match="netrc"):
            hermitcrab.GatewayEnvironment(credentials=[".netrc"])
        with pytest.raises(UnsupportedCapability, match="network"):
            hermitcrab.GatewayEnvironment(network=False)

    def test_a_signal_reaches_what_was_started(self, env: hermitcrab.Environment) -> None:
        process = env.start("trap 'echo got it; exit 5' USR1; echo >/tmp/up; while :; do sleep 0.05; done")
        while env.execute("test -e /tmp/up").returncode:
            pass
        process.signal(10)
        result = process.wait(30)
        assert (result.output[-7:], result.returncode) == ("got it\n", 5)

    def test_an_interrupt_cancels(self, env: hermitcrab.Environment, cloud: Cloud) -> None:
        running = env.stream("echo $$; sleep 601 & echo >/tmp/up; sleep 600")
        while env.execute("test -e /tmp/up").returncode:
            pass
        assert env.interrupt() == 1
        result = running.wait(30)
        assert (result.returncode, result.outcome) == (INTERRUPTED, Outcome.INTERRUPTED)
        pid, *rest = result.output.splitlines()
        assert rest == ["[Command interrupted]"]
        assert env.execute(f"kill -0 {pid}; pgrep -f 'sleep 60[01]'").returncode == 1
        assert any(call.endswith("/cancel") for call in cloud.calls())

    def test_a_gateway_that_forgets_the_limit(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(execs, "GRACE", 0.3)
        monkeypatch.setenv(CANCEL[0], "0.5")
        with hermitcrab.open("gateway") as env:
            result = env.execute("sleep 600 # quirk:deaf", timeout=0.3)
        assert (result.returncode, result.outcome) == (TIMED_OUT, Outcome.TIMED_OUT)
        assert result.output == "[Command timed out after 0.3s]\n"
        assert any(call.endswith("/cancel") for call in cloud.calls())

    def test_a_sandbox_that_is_gone(self, env: hermitcrab.Environment, cloud: Cloud) -> None:
        env.execute("v=kept; cd /usr")
        cloud.vanish(env.sandbox_id)
        with pytest.raises(SandboxLost, match="no such sandbox"):
            env.execute("echo no")
        with pytest.warns(hermitcrab.HermitcrabWarning, match="made anew"):
            assert env.execute("echo $v; pwd").output == "kept\n/usr\n"

    def test_files_are_kept_for_the_task(self, cloud: Cloud) -> None:
        with hermitcrab.GatewayEnvironment(persistent_filesystem=True, task_id="kept") as env:
            env.execute("echo here >/root/file")
        assert cloud.calls()[-1].endswith("/terminate")
        with hermitcrab.ManagedModalEnvironment(persistent_filesystem=True, task_id="kept") as env:
            assert env.execute("cat file").output == "here\n"
            settings = cloud.box()["settings"]
            assert (settings["cwd"], settings["persistentFilesystem"]) == ("/root", True)
        with hermitcrab.GatewayEnvironment(task_id="kept") as env:
            assert env.execute("test -e /root/file").returncode == 1


class TestTroubles:
    def test_creation_is_repeated_with_the_same_key(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=503, afterwards=True)
        cloud.fault(CREATE, cut_after=0)
        cloud.fault(CREATE, status=429, headers={"retry-after": "0"})
        with hermitcrab.open("gateway"):
            assert len(cloud.boxes()) == 1
            assert len([call for call in cloud.calls() if re.search(CREATE, call)]) == 4

    @pytest.mark.parametrize(
        ("fault", "kind", "told"),
        [
            ({"status": 401}, BackendUnavailable, "refused us: ordered by a test.*token create"),
            ({"status": 400, "message": "raw:{}"}, SandboxStartError, "{}"),
            ({"status": 503, "times": 4, "message": "raw:"}, SandboxStartError, "HTTP 503"),
        ],
    )
    def test_creation_that_fails(self, cloud: Cloud, fault: Any, kind: type[Exception], told: str) -> None:
        cloud.fault(CREATE, **fault)
        with pytest.raises(kind, match=told):
            hermitcrab.open("gateway")

    def test_a_sandbox_without_an_id(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match="no id"):
            hermitcrab.GatewayEnvironment(image="no-id")
        cloud.vanish(cloud.box()["id"])

    @pytest.mark.parametrize(
        "fault",
        [
            {"path": START, "status": 503, "afterwards": True},
            {"path": START, "cut_after": 0},
            {"path": START, "status": 502, "times": 2},
            {"path": START, "status": 429, "headers": {"retry-after": "0.1"}},
            {"path": START, "status": 500, "message": "raw:<html>", "afterwards": True},
            {"path": POLLS, "status": 503, "times": 3},
            {"path": POLLS, "cut_after": 1},
        ],
        ids=lambda fault: "-".join(map(str, list(fault.values())[1:3])),
    )
    def test_a_command_runs_once_and_is_answered(
        self, env: hermitcrab.Environment, cloud: Cloud, fault: dict[str, Any]
    ) -> None:
        cloud.fault(**fault)
        result = env.execute("echo ran >>/tmp/count; cat /tmp/count; cd /usr; exit 4")
        assert (result.output, result.returncode, env.cwd) == ("ran\n", 4, "/usr")

    @pytest.mark.parametrize(
        ("quirk", "told"),
        [
            ("other-exec-id", "another one"),
            ("odd-status", "asleep"),
            ("failed", "not known: the node went away"),
            ("forgotten", "nothing of it any more"),
        ],
    )
    def test_an_odd_answer_is_never_a_result(
        self, env: hermitcrab.Environment, quirk: str, told: str
    ) -> None:
        with pytest.raises(SandboxLost, match=told):
            env.execute(f"kill -9 $PPID # quirk:{quirk}")
        assert env.execute("echo next").output == "next\n"

    def test_an_answer_without_a_returncode(self, env: hermitcrab.Environment) -> None:
        assert env.execute("exit 7 # quirk:no-returncode").returncode == 7
        assert env.execute("kill -9 $PPID # quirk:no-returncode").returncode == 1
        assert env.execute("echo at once # quirk:at-once").output == "at once\n"

    def test_a_gateway_that_stays_away(self, cloud: Cloud) -> None:
        with hermitcrab.open("gateway", patience=0.5) as env:
            with pytest.raises(SandboxLost, match=r"not known: for .* s .*something else than an object"):
                env.execute("sleep 0.2 # quirk:not-an-object")
            cloud.fault(START, status=503, times=1000)
            with pytest.raises(SandboxLost, match="ordered by a test"):
                env.execute("true")
            cloud.heal()
            assert env.execute("echo back").output == "back\n"

    def test_a_command_that_is_refused(self, env: hermitcrab.Environment, cloud: Cloud) -> None:
        cloud.fault(START, status=413, message="too large")
        with pytest.raises(SandboxLost, match="too large; nothing was run"):
            env.execute("true")

    def test_the_command_line_gives_its_stdin_whole(
        self, cloud: Cloud, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reading, writing = os.pipe()
        os.write(writing, b"piped \xff\n")
        os.close(writing)
        with open(reading) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(["run", "--quiet", "--on", "gateway", "--", "od -c; exit 3"]) == 3
        assert b"377" in capfdbinary.readouterr().out

    def test_what_it_says_to_doctor(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        assert listing.check("gateway").usable
        assert listing.sandboxes("gateway") == []
        monkeypatch.delenv("HERMITCRAB_GATEWAY_URL")
        assert "url" in listing.check("gateway").detail
        assert listing.sandboxes("gateway") == []


class TestOurs:
    """What ours can beyond the five calls."""

    def test_a_gateway_killed_under_a_command(
        self, tmp_path: Path, quiet_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with gateway(tmp_path / "state", "--engine", "local") as first:
            address = first.url.removeprefix("http://")
            env = hermitcrab.GatewayEnvironment(first.url)
            data = os.urandom(3 * MB)
            env.files.write(f"{tmp_path}/copy", data)
            assert env.files.read(f"{tmp_path}/copy") == data
            assert (tmp_path / "copy").read_bytes() == data
            os.mkfifo(tmp_path / "go")
            monkeypatch.setenv("HERMITCRAB_GATEWAY_URL", first.url)
            assert [each.id for each in listing.sandboxes("gateway")] == [env.sandbox_id]
            running = env.stream(
                f"echo ran >>{tmp_path}/count; echo first; cat {tmp_path}/go; printf '\\377'; cd /usr"
            )
            assert next(iter(running)) == "first\n"
            first.end(9)
        with gateway(tmp_path / "state", "--engine", "local", "--listen", address):
            (tmp_path / "go").write_text("second\n")
            result = running.wait(60)
            assert (result.output, result.returncode) == ("first\nsecond\n\ufffd", 0)
            assert (tmp_path / "count").read_text() == "ran\n"
            assert env.cwd == "/usr"
            env.cleanup()
