"""Daytona by its own SDK, against a server on this machine that really executes: what goes wrong, and what a
user sees of it."""

from __future__ import annotations

import asyncio
import os
import time

import daytona
import pytest

import hermitcrab
from hermitcrab import snapshots
from hermitcrab.backends import daytona as backend
from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.backends.daytona import failures
from hermitcrab.backends.daytona.terminal import Door
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    HermitcrabWarning,
    SandboxLost,
    SandboxStartError,
)
from hermitcrab.testing.inside import PATIENCE, meanwhile, say, soon
from tests.clouds import daytona as wire
from tests.clouds.keeping import Keeping
from tests.clouds.losing import Losing
from tests.clouds.provided import KEPT, Calls, Provided, cannot_start, fresh, lost
from tests.clouds.running import Cloud
from tests.clouds.starting import Starting

CREATE = "POST /api/sandbox$"
STREAM = "GET /toolbox/.*/process/pty/create-connect"
SNAPSHOT = "POST /api/sandbox/.*/snapshot$"

cloud = fresh("daytona")


class OfDaytona(Provided):
    backend, title, sdk, package = "daytona", "Daytona", daytona, "daytona"
    environment = hermitcrab.DaytonaEnvironment
    secret = "DAYTONA_API_KEY"
    failed = "Daytona: .*{words}"
    unstarted = "HTTP 502"
    gone = "is gone at Daytona: somebody ended it, or its time was over"
    made_from = wire.DEFAULT
    fatal = 502
    calls = Calls(create=CREATE, end="DELETE /api/sandbox/", start=STREAM, stream=STREAM, snapshot=SNAPSHOT)


class TestStart(OfDaytona, Starting):
    explained_by, exceptions = failures, 40
    imports = ("aiohttp",)
    silent = True

    def test_what_stays_wrong_fails_at_once(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="Snapshot no-such not found"):
            self.open(template="no-such")
        with pytest.raises(ConfigError, match="disk of 11 exceeds the maximum of 10"):
            hermitcrab.open("daytona:debian:12", disk=11 * 1024)
        assert self.made(cloud) == 2
        monkeypatch.setenv("DAYTONA_API_KEY", "dtn_secret")
        with pytest.raises(BackendUnavailable, match=r"refused the key in DAYTONA_API_KEY.*/keys") as caught:
            self.open()
        assert "dtn_secret" not in str(caught.value)

    def test_the_running_state_is_waited_for(self, cloud: Cloud) -> None:
        with hermitcrab.open(f"daytona:{wire.SLOW}") as env:
            assert say(env, "echo fine") == "fine"
        # By an event: nothing was asked again and again.
        assert len([call for call in cloud.calls() if call.startswith("GET /api/sandbox/")]) <= 5

    def test_a_state_that_is_the_end_is_named(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match=r"BUILD_FAILED.*the oven is cold"):
            hermitcrab.open(f"daytona:{wire.BROKEN}")
        assert cloud.boxes() == []
        assert self.made(cloud) == 1

    def test_a_state_that_stays_pending(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match=r"at Daytona took longer than 2 s"):
            hermitcrab.open(f"daytona:{wire.ENDLESS}", start_timeout=2)
        assert 0 < cloud.box()["expires"] <= time.time() + LEAST + 1  # by itself, soon

    def test_what_is_set_arrives(self, cloud: Cloud) -> None:
        with self.open(network=False, user="root", task_id="t1", cwd="~/made") as env:
            box = cloud.box()
            assert not box["network"]
            assert box["labels"]["hermitcrab.task"] == "t1"
            assert box["settings"]["snapshot"] == wire.DEFAULT
            assert say(env, "id -un; pwd; echo $DAYTONA_SANDBOX_ID") == f"root\n/root/made\n{box['id']}"
            assert say(env, "tail -n +3 /proc/net/dev | wc -l") == "1"
            assert env.sandbox_id == box["id"]
        assert cloud.boxes() == []

    def test_resources_are_whole(self, cloud: Cloud) -> None:
        with hermitcrab.DaytonaEnvironment("debian:12", cpu=2, memory=4096, disk=5 * 1024):
            sizes = cloud.box()["settings"]
            assert (sizes["image"], sizes["cpu"], sizes["memory"], sizes["disk"]) == ("debian:12", 2, 4, 5)
        with pytest.warns(HermitcrabWarning) as told:
            hermitcrab.DaytonaEnvironment("debian:12", cpu=1.5, memory=1500, disk=3072).cleanup()
        assert [str(each.message) for each in told] == [
            "daytona: cpu: the sandbox has 2, not 1.5",
            "daytona: memory: the sandbox has 2048 MiB, not 1500",
        ]
        cloud.calls(forget=True)
        with pytest.raises(ConfigError, match="memory: got '512', takes nothing without an image"):
            self.open(memory=512)
        with pytest.raises(ConfigError, match="image and template: got 'a' and 'b'"):
            hermitcrab.open("daytona:a", template="b")
        with pytest.raises(ConfigError, match="takes a name without spaces"):
            self.open(image="a\nRUN b")
        assert cloud.calls() == []


class TestLoss(OfDaytona, Losing):
    def test_a_connection_that_is_too_slow_for_daytona(self, cloud: Cloud) -> None:
        cloud.fault(STREAM, cut_after=400_000, status=1008, message="slow consumer")
        with self.open() as env:
            say(env, "v=kept; echo once >>/tmp/ran")
            with pytest.raises(SandboxLost, match="more was printed at once than the connection took"):
                env.execute("echo twice >>/tmp/ran; head -c 1000000 /dev/zero", timeout=PATIENCE)
            assert say(env, "echo $v; cat /tmp/ran") == "kept\nonce\ntwice"

    def test_a_sandbox_that_was_archived_between_two_commands(self, cloud: Cloud) -> None:
        with self.open() as env:
            id = env.sandbox_id
            say(env, "v=kept; touch /tmp/mine")
            cloud.stop(id, "archived")
            lost(env)
            assert say(env, "echo $v; ls /tmp") == "kept\nmine"
            assert env.sandbox_id == id
        assert self.made(cloud) == 1

    def test_a_sandbox_that_broke(self, cloud: Cloud) -> None:
        with self.open() as env, meanwhile(env, "touch /tmp/up; sleep 600") as future:
            soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
            cloud.stop(env.sandbox_id, "error")
            error = future.exception(PATIENCE)
            assert isinstance(error, SandboxLost)
            assert "is in the state error at Daytona: the oven is cold" in str(error)
            with pytest.raises(SandboxStartError, match="in the state error at Daytona: the oven is cold"):
                env.execute("true")
        assert cloud.boxes() == []

    def test_a_provider_that_is_down_when_the_sandbox_is_needed(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault("POST .*/start$", status=500, times=4, message="not today")
            cloud.stop(env.sandbox_id)
            lost(env)
            cannot_start(env, "not today")
            assert say(env, "echo $v; ls /tmp") == "kept\nran"
            cloud.fault(STREAM, status=500, times=4)
            cloud.cut(STREAM)
            lost(env)
            cannot_start(env, "HTTP 500")
        assert cloud.boxes() == []


class TestLife(OfDaytona):
    def test_it_is_never_shorter_than_a_commands(self, cloud: Cloud) -> None:
        with self.open(max_lifetime=301) as env:
            assert cloud.box()["expires"] >= time.time() + 350  # Daytona counts minutes
            env.execute("true", timeout=1800)
            soon(lambda: cloud.box()["expires"] >= time.time() + 1800)
            # That much is refused; then it is extended again and again.
            assert env.execute("true", timeout=48 * 3600).returncode == 0
        with self.open(**KEPT) as env:
            env.execute("true", timeout=1800)
            soon(lambda: cloud.box()["expires"] >= time.time() + 1800)
            assert cloud.box()["settings"]["autostop"] > 30


class TestPersistence(OfDaytona, Keeping):
    def test_a_lost_answer_and_a_snapshot_that_sleeps(self, cloud: Cloud) -> None:
        with self.open(**KEPT) as env:
            say(env, "echo mine >~/file; v=kept")
            cloud.fault(SNAPSHOT, status=500, afterwards=True)  # it was made, and the answer was lost
        assert (cloud.boxes(), len(cloud.snapshots())) == ([], 1)
        (kept,) = snapshots.list_snapshots()
        assert kept.native == f"hermitcrab-{kept.id}"  # noted before it was made
        asyncio.run(self.put_to_sleep())
        with self.open(**KEPT) as env:
            assert say(env, "cat ~/file; echo $v") == "mine\nkept"
        assert len(cloud.snapshots()) == 1  # the one before it was replaced

    async def put_to_sleep(self) -> None:
        """As Daytona does with a snapshot that nobody used for weeks."""
        from daytona_api_client_async import ApiClient, Configuration, SnapshotsApi

        async with ApiClient(Configuration(host=os.environ["DAYTONA_API_URL"])) as client:
            client.default_headers["Authorization"] = f"Bearer {wire.KEY}"
            (kept,) = (await SnapshotsApi(client).get_all_snapshots(limit=1)).items
            await SnapshotsApi(client).deactivate_snapshot(kept.id)


def test_a_cleanup_that_is_interrupted_removes_it_all_the_same(cloud: Cloud) -> None:
    async def interrupted() -> None:
        env = await hermitcrab.aopen("daytona")
        cleaning = asyncio.create_task(env.cleanup())
        await asyncio.sleep(0)
        cleaning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cleaning

    asyncio.run(interrupted())
    assert cloud.boxes() == []


class TestDoctor:
    def test_without_a_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in (failures.KEY, failures.TOKEN, failures.ORGANIZATION):
            monkeypatch.delenv(name, raising=False)
        health = backend.BACKEND.check()
        assert (health.usable, health.detail) == (False, "DAYTONA_API_KEY is not set")
        assert "https://app.daytona.io" in health.hint
        assert backend.BACKEND.sandboxes is not None
        assert backend.BACKEND.sandboxes() == []
        monkeypatch.setenv(failures.TOKEN, "a token needs an organization")
        assert not backend.BACKEND.check().usable

    def test_a_key_is_asked_about_and_nothing_is_made(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert backend.BACKEND.check() == (True, "Daytona takes the key in DAYTONA_API_KEY", "")
        monkeypatch.setenv("DAYTONA_API_KEY", "dtn_secret")
        health = backend.BACKEND.check()
        assert not health.usable
        assert "refused the key" in health.detail
        assert "dtn_secret" not in health.detail + health.hint
        assert [call for call in cloud.calls() if "socket.io" not in call] == ["GET /api/snapshots"] * 2
        monkeypatch.setenv("DAYTONA_API_URL", "http://127.0.0.1:9/api")
        health = backend.BACKEND.check()
        assert (health.usable, health.detail[:9]) == (False, "Daytona: ")


class TestFailures:
    def test_what_they_mean(self) -> None:
        late = failures.understood(daytona.DaytonaRateLimitError("slow down", headers={"Retry-After": "0.4"}))
        assert (late.refused, late.passing, late.retry_after) == (True, False, 0.4)
        assert failures.understood(daytona.DaytonaConnectionError("gone")).passing
        assert failures.understood(daytona.DaytonaError("odd", status_code=507)).passing
        assert not failures.understood(daytona.DaytonaError("entered error state")).passing
        assert not failures.understood(daytona.DaytonaQueueTimeoutError("full")).passing
        assert "KeyError: 'odd'" in str(failures.understood(KeyError("odd")).error)


def test_what_a_login_shell_says_is_not_the_scripts() -> None:
    heard: list[bytes] = []
    door = Door(heard.append)
    for piece in (b'motd\r\n$ echo HCRAB-"READY"\r\n' + b"x" * 99_999, b"HCRAB-", b"READY\nfir", b"st"):
        door(piece)
    door.shut = True
    door(b"late")
    assert heard == [b"fir", b"st"]
