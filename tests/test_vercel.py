"""Vercel by its own SDK, against a server on this machine that really executes: what goes wrong, and what a
user sees of it."""

from __future__ import annotations

import time
from hashlib import sha256
from typing import Any

import httpx2
import pytest
from vercel import sandbox

import hermitcrab
from hermitcrab.backends import vercel as backend
from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.backends.vercel import failures
from hermitcrab.backends.vercel.config import RestoredConfig, VercelConfig, image, refuse, vcpus
from hermitcrab.core import loop
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    HermitcrabWarning,
    SandboxLost,
    SandboxStartError,
)
from hermitcrab.testing.inside import PATIENCE, meanwhile, read_until, say, soon
from tests.clouds import vercel as wire
from tests.clouds.keeping import Keeping
from tests.clouds.losing import Losing, LosingInput
from tests.clouds.provided import KEPT, Calls, Provided, count, fresh, lost, ran, without_meaning
from tests.clouds.running import Cloud
from tests.clouds.starting import Starting

CREATE = "POST /api/v3/sandboxes$"
INPUT = "/stdin$"
STREAM = "GET /api/v2/sandboxes/sessions/.*/logs$"
SNAPSHOT = "POST .*/snapshot$"
END = "DELETE /api/v2/sandboxes/"
ASK = "GET /api/v2/sandboxes/hermitcrab-"
TRANSPORT = (httpx2.ConnectError, httpx2.ReadTimeout, httpx2.RemoteProtocolError, httpx2.StreamClosed)

cloud = fresh("vercel", unset=["VERCEL_OIDC_TOKEN"])


class OfVercel(Provided):
    backend, title, sdk, package = "vercel", "Vercel", sandbox, "vercel-sandbox"
    environment = hermitcrab.VercelSandboxEnvironment
    secret = "VERCEL_TOKEN"
    failed = "Vercel: HTTP {status}: {words}"
    unstarted = "Vercel: HTTP 500: no way in"
    gone = "is gone at Vercel: somebody removed it"
    made_from = wire.DEFAULT_IMAGE
    calls = Calls(create=CREATE, end=END, start="POST .*/cmd$", stream=STREAM, snapshot=SNAPSHOT)

    def break_pipe(self, cloud: Cloud) -> None:
        cloud.fault(STREAM, status=404)
        super().break_pipe(cloud)


class TestStart(OfVercel, Starting):
    explained_by, exceptions = failures, 15
    elsewhere = r".*\.(__main__|_[A-Z]\w*)$"
    development = True

    def test_what_stays_wrong_fails_at_once(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(SandboxStartError, match="Image 'no-such' was not found"):
            hermitcrab.open("vercel:no-such")
        with pytest.raises(SandboxStartError, match="timeout restricted to <= 45m"):
            self.open(max_lifetime=3600)
        assert self.made(cloud) == 2
        monkeypatch.setenv("VERCEL_TOKEN", "vcp_secret")
        with pytest.raises(BackendUnavailable, match=r"refused the token in VERCEL_TOKEN.*tokens") as caught:
            self.open()
        assert "vcp_secret" not in str(caught.value)

    def test_a_machine_that_does_not_come_up(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match=r"starting a sandbox at Vercel took longer than 2 s"):
            self.open(image=wire.PENDING, start_timeout=2)
        assert count(cloud, ASK) >= 1
        with pytest.raises(SandboxStartError, match=r"reached terminal state .*failed"):
            self.open(image=wire.BROKEN)
        assert [box["made_from"] for box in cloud.boxes()] == [wire.PENDING]

    def test_what_is_set_arrives(self, cloud: Cloud) -> None:
        options: Any = {"runtime": "node24", "network": False, "task_id": "t1", "cpu": 4, "memory": 8192}
        with self.open(cwd="~/made", **options) as env:
            box = cloud.box()
            assert box["labels"]["hermitcrab.task"] == "t1"
            assert box["made_from"] == "vercel/sandbox/node:24"
            assert box["settings"]["resources"] == {"vcpus": 4, "memory": 8192}
            assert not box["settings"]["persistent"]
            assert say(env, "pwd; tail -n +3 /proc/net/dev | wc -l") == "/home/user/made\n1"
            assert env.sandbox_id == box["id"]
        assert cloud.boxes() == []
        with pytest.warns(HermitcrabWarning) as warned:
            hermitcrab.VercelSandboxEnvironment(memory=16384).cleanup()
        assert [str(each.message) for each in warned] == [
            "vercel: cpu: Vercel gave 4, not 8",
            "vercel: memory: Vercel gave 8192, not 16384",
        ]

    @pytest.mark.parametrize(
        ("settings", "says"),
        [
            ({"disk": 9}, "disk: got '9', takes nothing"),
            ({"runtime": "node9"}, "runtime: got 'node9', takes universal, ubuntu, node22"),
            ({"runtime": "node24", "image": "mine"}, "takes nothing where an image is given"),
            ({"cpu": 1.5}, "cpu: got '1.5', takes whole vCPUs: 1, or an even number up to 32"),
            ({"cpu": 3}, "cpu: got '3', takes whole"),
            ({"memory": 3000}, "takes 2048 MiB for each vCPU.*: 4096, for example"),
            ({"memory": 512}, "2048, for example"),
            (
                {"cpu": 2, "memory": 2048},
                "memory: got '2048', takes 4096 with cpu=2.*leave one of the two out",
            ),
        ],
    )
    def test_what_vercel_does_not_sell(self, settings: Any, says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            refuse(VercelConfig(**settings))

    def test_what_it_sells(self) -> None:
        assert vcpus(VercelConfig()) is None
        assert vcpus(VercelConfig(cpu=1)) == vcpus(VercelConfig(memory=2048)) == 1
        assert vcpus(VercelConfig(cpu=8, memory=16384)) == 8
        assert image(VercelConfig(runtime="python3.14")) == "vercel/sandbox/python:3.14"
        assert image(RestoredConfig(image="mine", snapshot="snap_1")) is None


class TestBytes(OfVercel):
    def test_output_is_exact_where_characters_break(self, cloud: Cloud) -> None:
        """Every byte at every place in a record, as the frames around it move it."""
        data = bytes(range(256)) * 3000 + "é日本🦀".encode() * 5000
        with self.open() as env:
            env.files.write("/tmp/data", data)
            assert say(env, "sha256sum </tmp/data | cut -d' ' -f1") == sha256(data).hexdigest()
            assert env.files.read("/tmp/data") == data
            assert say(env, "tail -c 60000 /tmp/data") == "é日本🦀" * 5000
            apart = env.execute("printf out; printf '\\303\\251' >&2", separate=True)
            assert (apart.stdout, apart.stderr) == ("out", "é")


class TestLoss(OfVercel, Losing, LosingInput):
    input = INPUT

    def test_a_stream_that_is_cut_in_the_middle_goes_on(self, cloud: Cloud) -> None:
        """The SDK asks for the output again, from the start, and hands on what it has not yet."""
        with self.open() as env:
            say(env, "seq 20000; touch /tmp/ran")
            streamed = env.stream("echo once >>/tmp/ran; seq 5000; read -r line; seq 5001 9000", stdin=True)
            read_until(streamed, "5000")
            cloud.fault(STREAM, cut_after=40_000)  # and once more, in the middle of a record
            assert cloud.cut(STREAM) == 1
            streamed.write(b"\n")
            streamed.close_stdin()
            rest = b"".join(chunk.data for chunk in streamed.chunks()).decode()
            assert rest.split()[-4000:] == [str(each) for each in range(5001, 9001)]
            assert streamed.wait(PATIENCE).returncode == 0
            assert ran(env, "once") == 1
        assert count(cloud, STREAM) == 3

    def test_input_that_was_turned_away_or_whose_answer_was_lost_arrives_once(self, cloud: Cloud) -> None:
        with self.open() as env:
            for fault in ({"status": 429}, {"status": 503, "afterwards": True}, {"cut_after": 0}):
                cloud.fault(INPUT, **fault)
                assert say(env, "echo once >>/tmp/ran; cat", stdin_data=b"exact") == "exact"
            assert ran(env, "once") == 3
            assert env.sandbox_id == cloud.box()["id"]

    def test_a_sandbox_that_stopped_is_not_resumed_without_its_files(self, cloud: Cloud) -> None:
        with self.open() as env:
            first = env.sandbox_id
            say(env, "v=kept; cd /usr; echo old >/tmp/mine")
            (fork,) = env.fork()
            # It stopped for that, and goes on by itself, with all that it had.
            for each in (env, fork):
                assert say(each, "echo $v; pwd; cat /tmp/mine") == "kept\n/usr\nold"
            fork.cleanup()
            assert cloud.snapshots() == []
            kept = env.snapshot()
            assert env.sandbox_id == first == cloud.box()["id"]
            say(env, "echo new >/tmp/mine")
            cloud.stop(first)
            lost(env)
            # What Vercel would resume is older than that.
            with pytest.warns(
                HermitcrabWarning, match="gone at Vercel; the session goes on in .*, made anew"
            ):
                assert say(env, "echo $v; pwd; ls /tmp") == "kept\n/usr"
            assert env.sandbox_id == cloud.box()["id"] != first
        with self.open(snapshot=kept) as env:
            assert say(env, "cat /tmp/mine; echo $v") == "old\nkept"
        assert cloud.boxes() == []
        hermitcrab.forget_snapshot(kept)
        assert cloud.snapshots() == []

    def test_a_sandbox_that_stops_under_a_command(self, cloud: Cloud) -> None:
        with self.open() as env, meanwhile(env, "touch /tmp/up; sleep 600") as future:
            soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
            cloud.stop(env.sandbox_id)
            error = future.exception(PATIENCE)
            assert isinstance(error, SandboxLost)
            assert "is stopped at Vercel: somebody stopped it, or its time was over" in str(error)

    def test_a_command_meets_a_session_that_is_over(self, cloud: Cloud) -> None:
        """Before we know: the SDK would resume a sandbox and run the command there."""
        with self.open(**KEPT) as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault(STREAM, pending=True)
            cloud.cut(STREAM)
            soon(lambda: count(cloud, STREAM) == 2)
            cloud.stop(env.sandbox_id)
            with pytest.raises(SandboxLost, match="stopped at Vercel"):
                env.execute("echo never >>/tmp/ran", timeout=PATIENCE)
            cloud.heal()
            assert say(env, "echo $v; echo once >>/tmp/ran; cat /tmp/ran") == "kept\nonce"
            assert env.sandbox_id == cloud.box()["id"]
            env._async._keeper = None

    def test_a_provider_that_is_down_when_the_sandbox_is_needed(self, cloud: Cloud) -> None:
        with self.open(**KEPT) as env:
            say(env, "v=kept; echo mine >~/file")
            cloud.expire(env.sandbox_id)
            lost(env)
            cloud.fault(ASK, status=500, times=4, message="not today")
            with pytest.raises(SandboxStartError, match="not today"):
                env.execute("echo never >>/tmp/ran")
            # Its time was over; Vercel kept its files, and it goes on.
            assert say(env, "echo $v; cat ~/file; ls /tmp") == "kept\nmine"
            assert len(cloud.snapshots()) == 1
            env._async._keeper = None
        assert (cloud.boxes(), cloud.snapshots()) == ([], [])  # nothing of Vercel's own either


class TestLife(OfVercel):
    def test_it_is_never_shorter_than_a_commands(self, cloud: Cloud) -> None:
        with self.open() as env:
            assert time.time() + LEAST - 10 <= cloud.box()["expires"] <= time.time() + LEAST + 1
            env.execute("true", timeout=1800)
            soon(lambda: cloud.box()["expires"] >= time.time() + 1800)
            # Vercel refuses that much; then what there is serves.
            assert env.execute("true", timeout=7200).returncode == 0
            assert cloud.box()["expires"] <= time.time() + wire.LONGEST_LIFE / 1000


class TestPersistence(OfVercel, Keeping):
    def test_what_was_made_and_nobody_heard_of_is_removed(self, cloud: Cloud) -> None:
        with self.open(**KEPT) as env:
            say(env, "echo mine >~/file; v=kept")
            cloud.fault(SNAPSHOT, status=500, afterwards=True)  # it was made, and the answer lost
            cloud.calls(forget=True)
        assert (count(cloud, SNAPSHOT), len(cloud.snapshots()), cloud.boxes()) == (1, 1, [])
        with self.open(**KEPT) as env:
            assert say(env, "cat ~/file; echo $v") == "mine\nkept"
            # As a program does that is killed before it hears what the snapshot is called.
            loop.run(backend._VERCEL.keep(env.sandbox_id, ""))
            lost(env)
            say(env, "echo more >>~/file")
            assert len(cloud.snapshots()) == 2
        assert len(cloud.snapshots()) == 1  # the one before it was replaced, and nobody knows the other


class TestDoctor:
    def test_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("VERCEL_OIDC_TOKEN", "VERCEL_OIDC_TOKEN_FILE", "VERCEL_PROJECT_ID"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("VERCEL_TOKEN", wire.TOKEN)
        monkeypatch.setenv("VERCEL_TEAM_ID", wire.TEAM)
        health = backend.BACKEND.check()
        assert (health.usable, health.detail) == (False, "VERCEL_PROJECT_ID is not set")
        assert "https://vercel.com/account/settings/tokens" in health.hint
        assert backend.BACKEND.sandboxes is not None
        assert backend.BACKEND.sandboxes() == []

    def test_a_token_is_asked_about_and_nothing_is_made(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert backend.BACKEND.check() == (True, "Vercel takes the token in VERCEL_TOKEN", "")
        monkeypatch.setenv("VERCEL_OIDC_TOKEN", "a.secret.token")  # which the SDK prefers
        health = backend.BACKEND.check()
        assert not health.usable
        assert "refused the token in VERCEL_OIDC_TOKEN" in health.detail
        assert "secret" not in health.detail + health.hint
        assert cloud.calls() == ["GET /api/v2/sandboxes"] * 2
        monkeypatch.setenv("VERCEL_SANDBOX_API_URL", "http://127.0.0.1:9")
        assert backend.BACKEND.check().detail.startswith("Vercel: ")


class TestFailures:
    def test_what_happened_decides_what_is_told(self) -> None:
        assert without_meaning(TRANSPORT, failures) == []
        assert isinstance(
            failures.understood(sandbox.SandboxStreamError("x", code="sandbox_stopped")).error, SandboxLost
        )
        closed = failures.understood(sandbox.SandboxStreamError("x", code="sandbox_stream_closed"))
        assert closed.passing
        assert not failures.understood(sandbox.SandboxStdinError("x", cause=OSError("cut"))).passing
        odd = failures.understood(KeyError("odd"))
        assert "KeyError: 'odd'" in str(odd.error)
        assert not odd.passing
