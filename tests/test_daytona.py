"""Daytona by its own SDK, against a server on this machine that really executes: what goes wrong, and what a
user sees of it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from hermitcrab.testing.inside import PATIENCE, meanwhile, read_until, say, soon
from tests.clouds import daytona as wire
from tests.clouds.checks import Calls, Checks, emptied, ran
from tests.clouds.running import Cloud

CREATE = "POST /api/sandbox$"
STREAM = "GET /toolbox/.*/process/pty/create-connect"
SNAPSHOT = "POST /api/sandbox/.*/snapshot$"
KEPT: Any = {"persistent_filesystem": True, "task_id": "kept"}

CRASHING = """
import sys, hermitcrab
env = hermitcrab.open('daytona', task_id='crash')
print(env.sandbox_id, flush=True)
sys.stdin.read()
"""
IMPORTING = """
import sys, hermitcrab
from hermitcrab.backends import registry
registry.get('daytona')
print([name for name in sys.modules if name.startswith(('daytona', 'aiohttp'))])
"""


@pytest.fixture
def cloud(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with emptied("daytona", monkeypatch) as cloud:
        yield cloud


def made(cloud: Cloud) -> int:
    return cloud.calls().count("POST /api/sandbox")


def lost(env: hermitcrab.Environment) -> bool:
    return bool(env._session.sandbox.lost)


class TestStart:
    def test_a_rate_limit_is_waited_for(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=429, headers={"Retry-After": "0.4"})
        began = time.monotonic()
        with hermitcrab.DaytonaEnvironment() as env:
            assert time.monotonic() - began >= 0.4
            assert say(env, "echo fine") == "fine"
        assert made(cloud) == 2

    def test_an_answer_that_was_lost_makes_no_second_sandbox(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=500, afterwards=True)
        with hermitcrab.open("daytona"):
            assert made(cloud) == 2  # the name of the first attempt is taken
            assert len(cloud.boxes()) == 1

    def test_it_gives_up_after_three_more_attempts(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=503, times=9, message="the cupboard is bare")
        with pytest.raises(SandboxStartError, match=r"Daytona: .*the cupboard is bare"):
            hermitcrab.open("daytona")
        assert made(cloud) == 4

    def test_what_stays_wrong_fails_at_once(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="Snapshot no-such not found"):
            hermitcrab.open("daytona", template="no-such")
        with pytest.raises(ConfigError, match="disk of 11 exceeds the maximum of 10"):
            hermitcrab.open("daytona:debian:12", disk=11 * 1024)
        assert made(cloud) == 2
        monkeypatch.setenv("DAYTONA_API_KEY", "dtn_secret")
        with pytest.raises(BackendUnavailable, match=r"refused the key in DAYTONA_API_KEY.*/keys") as caught:
            hermitcrab.open("daytona")
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
        assert made(cloud) == 1

    def test_a_state_that_stays_pending(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match=r"at Daytona took longer than 2 s"):
            hermitcrab.open(f"daytona:{wire.ENDLESS}", start_timeout=2)
        assert 0 < cloud.box()["expires"] <= time.time() + LEAST + 1  # by itself, soon

    def test_a_sandbox_in_which_nothing_starts_is_removed(self, cloud: Cloud) -> None:
        cloud.fault(STREAM, status=502, times=9, message="no way in")
        with pytest.raises(SandboxStartError, match="HTTP 502"):
            hermitcrab.open("daytona")
        assert cloud.boxes() == []

    def test_what_is_set_arrives(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona", network=False, user="root", task_id="t1", cwd="~/made") as env:
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
            hermitcrab.open("daytona", memory=512)
        with pytest.raises(ConfigError, match="image and template: got 'a' and 'b'"):
            hermitcrab.open("daytona:a", template="b")
        with pytest.raises(ConfigError, match="takes a name without spaces"):
            hermitcrab.open("daytona", image="a\nRUN b")
        assert cloud.calls() == []


class TestLoss:
    def test_a_stream_that_is_cut_in_the_middle(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona") as env:
            say(env, "v=kept; cd /usr; f() { echo $v; }")
            streamed = env.stream("echo once >>/tmp/ran; echo before; sleep 600; echo after")
            read_until(streamed, "before")
            assert cloud.cut(STREAM) == 1
            with pytest.raises(SandboxLost, match="the connection to it broke") as caught:
                streamed.wait(PATIENCE)
            assert caught.value.partial_output == "before\n"
            assert say(env, "f; pwd") == "kept\n/usr"
            assert ran(env, "once") == 1
            # Nothing of the lost agent is left; one `sleep` is the sandbox's own.
            soon(lambda: say(env, "pgrep -c sleep") == "1" and cloud.box()["programs"] == 1)
        assert made(cloud) == 1

    def test_a_connection_that_is_too_slow_for_daytona(self, cloud: Cloud) -> None:
        cloud.fault(STREAM, cut_after=400_000, status=1008, message="slow consumer")
        with hermitcrab.open("daytona") as env:
            say(env, "v=kept; echo once >>/tmp/ran")
            with pytest.raises(SandboxLost, match="more was printed at once than the connection took"):
                env.execute("echo twice >>/tmp/ran; head -c 1000000 /dev/zero", timeout=PATIENCE)
            assert say(env, "echo $v; cat /tmp/ran") == "kept\nonce\ntwice"

    def test_a_sandbox_that_was_archived_between_two_commands(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona") as env:
            id = env.sandbox_id
            say(env, "v=kept; touch /tmp/mine")
            cloud.stop(id, "archived")
            soon(lambda: lost(env))
            assert say(env, "echo $v; ls /tmp") == "kept\nmine"
            assert env.sandbox_id == id
        assert made(cloud) == 1

    def test_a_sandbox_that_broke(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona") as env, meanwhile(env, "touch /tmp/up; sleep 600") as future:
            soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
            cloud.stop(env.sandbox_id, "error")
            error = future.exception(PATIENCE)
            assert isinstance(error, SandboxLost)
            assert "is in the state error at Daytona: the oven is cold" in str(error)
            with pytest.raises(SandboxStartError, match="in the state error at Daytona: the oven is cold"):
                env.execute("true")
        assert cloud.boxes() == []

    def test_a_sandbox_that_vanished(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona") as env:
            say(env, "v=kept; cd /usr; touch /tmp/mine")
            with meanwhile(env, "touch /tmp/up; sleep 600") as future:
                soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
                cloud.vanish(env.sandbox_id)
                assert "is gone at Daytona: somebody ended it, or its" in str(future.exception(PATIENCE))
            anew = "is gone at Daytona; the session goes on in .*, made anew"
            with pytest.warns(HermitcrabWarning, match=anew):
                assert say(env, "echo $v; pwd; ls /tmp") == "kept\n/usr"
            assert env.sandbox_id == cloud.box()["id"]
            assert made(cloud) == 2

    def test_a_provider_that_is_down_when_the_sandbox_is_needed(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona") as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault("POST .*/start$", status=500, times=4, message="not today")
            cloud.stop(env.sandbox_id)
            soon(lambda: lost(env))
            with pytest.raises(SandboxStartError, match="not today"):
                env.execute("echo never >>/tmp/ran")
            assert say(env, "echo $v; ls /tmp") == "kept\nran"
            assert ran(env, "never") == 0
            cloud.fault(STREAM, status=500, times=4)
            cloud.cut(STREAM)
            soon(lambda: lost(env))
            with pytest.raises(SandboxStartError):
                env.execute("echo never >>/tmp/ran")
            assert ran(env, "never") == 0
        assert cloud.boxes() == []


class TestLife:
    def test_it_is_never_shorter_than_a_commands(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona", max_lifetime=301) as env:
            assert cloud.box()["expires"] >= time.time() + 350  # Daytona counts minutes
            env.execute("true", timeout=1800)
            soon(lambda: cloud.box()["expires"] >= time.time() + 1800)
            # That much is refused; then it is extended again and again.
            assert env.execute("true", timeout=48 * 3600).returncode == 0
        with hermitcrab.open("daytona", **KEPT) as env:
            env.execute("true", timeout=1800)
            soon(lambda: cloud.box()["expires"] >= time.time() + 1800)
            assert cloud.box()["settings"]["autostop"] > 30

    def test_nothing_outlives_a_killed_program_for_long(self, cloud: Cloud) -> None:
        program = subprocess.Popen(
            [sys.executable, "-c", CRASHING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        id = program.stdout.readline().strip()
        with hermitcrab.open("daytona") as env:
            (of_program,) = [each for each in backend.BACKEND.sandboxes() if each.id == id]  # type: ignore[misc]
            assert (of_program.task, of_program.orphaned) == ("crash", False)
            assert (of_program.owner, of_program.detail) == (f"pid {program.pid}", wire.DEFAULT)
            program.send_signal(signal.SIGKILL)
            program.communicate()
            assert backend.BACKEND.reap is not None
            assert [(each.id, each.orphaned) for each in backend.BACKEND.reap()] == [(id, True)]
            assert [box["id"] for box in cloud.boxes()] == [env.sandbox_id]


class TestPersistence:
    def test_a_task_goes_on(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona", **KEPT) as env:
            say(env, "echo mine >~/file; v=kept")
            cloud.fault(SNAPSHOT, status=500, afterwards=True)  # it was made, and the answer was lost
        assert (cloud.boxes(), len(cloud.snapshots())) == ([], 1)
        (kept,) = snapshots.list_snapshots()
        assert kept.native == f"hermitcrab-{kept.id}"  # noted before it was made
        asyncio.run(self.put_to_sleep())
        with hermitcrab.open("daytona", **KEPT) as env:
            assert say(env, "cat ~/file; echo $v") == "mine\nkept"
            say(env, "echo more >>~/file")
            cloud.vanish(env.sandbox_id)
            soon(lambda: lost(env))
            with pytest.warns(HermitcrabWarning, match="made anew"):
                assert say(env, "cat ~/file; echo $v") == "mine\nkept"
        assert len(cloud.snapshots()) == 1  # the one before it was replaced

    async def put_to_sleep(self) -> None:
        """As Daytona does with a snapshot that nobody used for weeks."""
        from daytona_api_client_async import ApiClient, Configuration, SnapshotsApi

        async with ApiClient(Configuration(host=os.environ["DAYTONA_API_URL"])) as client:
            client.default_headers["Authorization"] = f"Bearer {wire.KEY}"
            (kept,) = (await SnapshotsApi(client).get_all_snapshots(limit=1)).items
            await SnapshotsApi(client).deactivate_snapshot(kept.id)

    def test_a_snapshot_that_expired(self, cloud: Cloud) -> None:
        with hermitcrab.open("daytona", **KEPT) as env:
            say(env, "echo mine >~/file")
        for snapshot in cloud.snapshots():
            cloud.expire_snapshot(snapshot)
        with pytest.warns(HermitcrabWarning, match="begins anew"):
            env = hermitcrab.open("daytona", **KEPT)
        assert say(env, "ls ~") == ""
        env.cleanup()


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


class TestShared(Checks):
    backend = "daytona"
    calls = Calls(create=CREATE, end="DELETE /api/sandbox/", stream=STREAM, snapshot=SNAPSHOT)


class TestDoctor:
    def test_without_the_sdk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "daytona", None)
        with pytest.raises(BackendUnavailable, match=r"daytona is not installed.*hermitcrab\[daytona\]"):
            hermitcrab.open("daytona")

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


def test_the_documentations_examples_run(cloud: Cloud) -> None:
    text = (Path(__file__).parent.parent / "docs" / "daytona.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("hello\ncrab\n\n", "")
    assert cloud.boxes() == []


class TestFailures:
    def test_every_exception_of_the_sdk_has_a_meaning(self) -> None:
        known, found = failures.meanings(), set()
        for module in pkgutil.walk_packages(daytona.__path__, "daytona."):
            for _, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if issubclass(each, Exception) and each.__module__.startswith("daytona"):
                    found.add(each)
                    assert any(base in known for base in each.__mro__), each
        assert len(found) > 40

    def test_what_they_mean(self) -> None:
        late = failures.understood(daytona.DaytonaRateLimitError("slow down", headers={"Retry-After": "7"}))
        assert (late.refused, late.passing, late.retry_after) == (True, False, 7)
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


def test_it_costs_nothing_before_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"


def test_no_thread_per_command_and_no_call_but_the_stream(cloud: Cloud) -> None:
    with hermitcrab.open("daytona") as env:
        say(env, "echo ready")
        before = threading.active_count()
        cloud.calls(forget=True)
        running = [env.start("sleep 600") for _ in range(8)]
        soon(lambda: env.execute("pgrep -c sleep").output.strip() == "9")
        assert threading.active_count() <= before
        assert len(running) == 8
        assert cloud.calls() == []
        assert os.environ["DAYTONA_API_KEY"] not in repr(env.state)
