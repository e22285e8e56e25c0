"""E2B by its own SDK, against a server on this machine that really executes: what goes wrong, and what a user
sees of it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import logging
import os
import pkgutil
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import e2b
import pytest

import hermitcrab
from hermitcrab.backends import e2b as backend
from hermitcrab.backends.clouds import stay
from hermitcrab.backends.clouds.life import LEAST, Life
from hermitcrab.backends.clouds.retry import Failure, persistently
from hermitcrab.backends.e2b import failures
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    HermitcrabWarning,
    SandboxError,
    SandboxLost,
    SandboxStartError,
)
from hermitcrab.testing.inside import PATIENCE, meanwhile, read_until, say, soon
from tests.clouds import e2b as wire
from tests.clouds.checks import Calls, Checks, emptied, ran
from tests.clouds.running import Cloud

CREATE = "POST /v2/sandboxes$"
INPUT = "POST /process.Process/SendInput"
STREAM = "POST /process.Process/Start"
KEPT: Any = {"persistent_filesystem": True, "task_id": "kept"}

CRASHING = """
import sys, hermitcrab
env = hermitcrab.open('e2b', task_id='crash')
print(env.sandbox_id, flush=True)
sys.stdin.read()
"""
IMPORTING = """
import sys, hermitcrab
from hermitcrab.backends import registry
registry.get('e2b')
print('e2b' in sys.modules)
"""


@pytest.fixture
def cloud(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with emptied("e2b", monkeypatch) as cloud:
        yield cloud


def made(cloud: Cloud) -> int:
    return cloud.calls().count("POST /v2/sandboxes")


class TestStart:
    def test_a_rate_limit_is_waited_for(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=429, headers={"Retry-After": "1"})
        began = time.monotonic()
        with hermitcrab.E2BEnvironment() as env:
            assert time.monotonic() - began >= 1
            assert say(env, "echo fine") == "fine"
        assert made(cloud) == 2

    def test_an_answer_that_was_lost_makes_no_second_sandbox(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=500, afterwards=True)
        cloud.fault(CREATE, cut_after=0)
        with hermitcrab.open("e2b"):
            assert made(cloud) == 3
            assert len(cloud.boxes()) == 1

    @pytest.mark.parametrize("status", [500, 429, 503])
    def test_it_gives_up_after_three_more_attempts(self, cloud: Cloud, status: int) -> None:
        cloud.fault(CREATE, status=status, times=9, message="the cupboard is bare")
        with pytest.raises(SandboxStartError, match=f"E2B: {status}: .*the cupboard is bare"):
            hermitcrab.open("e2b")
        assert made(cloud) == 4

    def test_what_stays_wrong_fails_at_once(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match="template 'no-such' not found"):
            hermitcrab.open("e2b:no-such")
        assert made(cloud) == 1
        with pytest.raises(ConfigError, match="invalid username: 'nobody-here'"):
            hermitcrab.open("e2b", user="nobody-here")
        cloud.fault(INPUT, status=500, message="down")
        with pytest.raises(SandboxStartError, match=r"the connection to it broke: .*down"):
            hermitcrab.open("e2b")
        assert cloud.boxes() == []

    def test_a_wrong_key(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("E2B_API_KEY", "e2b_secret")
        with pytest.raises(BackendUnavailable, match=r"refused the key in E2B_API_KEY.*dashboard") as caught:
            hermitcrab.open("e2b")
        assert "e2b_secret" not in str(caught.value)

    def test_a_sandbox_that_stays_pending(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(stay, "_NEWS_EVERY", 0.2)
        cloud.fault(CREATE, pending=True)
        with (
            caplog.at_level(logging.INFO, "hermitcrab.clouds"),
            pytest.raises(SandboxStartError, match=r"starting a sandbox at E2B took longer than 0.7 s"),
        ):
            hermitcrab.open("e2b", start_timeout=0.7)
        assert "starting a sandbox at E2B: 0.4 s so far" in caplog.messages

    def test_a_sandbox_in_which_nothing_starts_is_removed(self, cloud: Cloud) -> None:
        cloud.fault(STREAM, status=500, times=9)
        with pytest.raises(SandboxStartError):
            hermitcrab.open("e2b")
        assert cloud.boxes() == []

    def test_what_is_set_arrives(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b", network=False, user="root", task_id="t1", cwd="~/made") as env:
            box = cloud.box()
            assert not box["network"]
            assert box["labels"]["hermitcrab.task"] == "t1"
            assert say(env, "id -un; pwd; echo $E2B_SANDBOX") == "root\n/root/made\ntrue"
            assert say(env, "tail -n +3 /proc/net/dev | wc -l") == "1"
            assert env.sandbox_id == box["id"]
        assert cloud.boxes() == []

    def test_resources_are_the_templates(self, cloud: Cloud) -> None:
        with hermitcrab.E2BEnvironment("large", cpu=8, memory=8192) as env:
            assert say(env, "echo fine") == "fine"
        with pytest.warns(HermitcrabWarning, match="cpu: the template 'base' has 2, not 4; E2B sets it when"):
            hermitcrab.E2BEnvironment("base", cpu=4).cleanup()
        with pytest.raises(SandboxLost, match="memory: the template 'base' has 512, not 600"):
            hermitcrab.E2BEnvironment("base", memory=600)  # warnings are errors here
        assert cloud.boxes() == []
        cloud.calls(forget=True)
        with pytest.raises(ConfigError, match="disk: got '9', takes nothing"):
            hermitcrab.open("e2b", disk=9)
        assert cloud.calls() == []


class TestLoss:
    def test_a_stream_that_is_cut_in_the_middle(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
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

    def test_input_that_was_turned_away_is_sent_again(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
            cloud.fault(INPUT, status=429, times=2)
            assert say(env, "echo once >>/tmp/ran; echo fine") == "fine"
            assert ran(env, "once") == 1

    def test_input_of_unknown_fate_is_not(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault(INPUT, status=500, afterwards=True)
            with pytest.raises(SandboxLost):
                env.execute("echo once >>/tmp/ran; sleep 600", timeout=PATIENCE)
            assert say(env, "echo $v") == "kept"
            assert ran(env, "once") <= 1
            cloud.fault(INPUT, status=500)
            with pytest.raises(SandboxLost):
                env.execute("echo never >>/tmp/ran", timeout=PATIENCE)
            assert ran(env, "never") == 0

    def test_a_sandbox_that_vanished_between_two_commands(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
            say(env, "v=kept; cd /usr; touch /tmp/mine")
            cloud.vanish(env.sandbox_id)
            soon(lambda: bool(env._session.sandbox.lost))
            with pytest.warns(
                HermitcrabWarning, match="is gone at E2B; the session goes on in .*, made anew"
            ):
                assert say(env, "echo $v; pwd; ls /tmp") == "kept\n/usr"
            assert env.sandbox_id == cloud.box()["id"]
            assert made(cloud) == 2

    def test_a_sandbox_that_vanished_under_a_command(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env, meanwhile(env, "touch /tmp/up; sleep 600") as future:
            soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
            cloud.vanish(env.sandbox_id)
            error = future.exception(PATIENCE)
            assert isinstance(error, SandboxLost)
            assert "is gone at E2B: somebody ended it, or its time was over" in str(error)

    def test_a_sandbox_that_was_paused_between_two_commands(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
            say(env, "v=kept; touch /tmp/mine")
            cloud.stop(env.sandbox_id, "paused")
            assert env.sandbox_id == cloud.box()["id"]
            soon(lambda: bool(env._session.sandbox.lost))
            assert say(env, "echo $v; ls /tmp") == "kept\nmine"
        assert made(cloud) == 1

    def test_a_provider_that_is_down_when_the_sandbox_is_needed(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault("/connect$", status=500, times=4, message="not today")
            cloud.stop(env.sandbox_id, "paused")
            soon(lambda: bool(env._session.sandbox.lost))
            with pytest.raises(SandboxStartError, match="not today"):
                env.execute("echo never >>/tmp/ran")
            assert say(env, "echo $v; ls /tmp") == "kept\nran"
            assert ran(env, "never") == 0

    def test_a_sandbox_that_cannot_be_entered_is_kept(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
            say(env, "v=kept; touch /tmp/mine")
            cloud.fault(STREAM, status=500, times=4)
            cloud.cut(STREAM)
            soon(lambda: bool(env._session.sandbox.lost))
            with pytest.raises(SandboxStartError):
                env.execute("touch /tmp/never")
            assert say(env, "echo $v; ls /tmp") == "kept\nmine"
        assert cloud.boxes() == []

    def test_a_sandbox_that_cannot_be_ended_ends_by_itself(
        self, cloud: Cloud, caplog: pytest.LogCaptureFixture
    ) -> None:
        env = hermitcrab.open("e2b")
        cloud.fault("DELETE", status=500, times=9)
        env.cleanup()
        assert f"the sandbox {env.sandbox_id} was not removed, and ends by itself in 300 s" in caplog.text
        assert cloud.box()["expires"] <= time.time() + LEAST + 1

    def test_after_a_loss_cleanup_still_removes_it(self, cloud: Cloud) -> None:
        env = hermitcrab.open("e2b")
        cloud.cut(STREAM)
        soon(lambda: bool(env._session.sandbox.lost))
        env.cleanup()
        assert cloud.boxes() == []


class TestLife:
    def test_it_is_never_shorter_than_a_commands(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b") as env:
            assert cloud.box()["expires"] >= time.time() + LEAST - 10
            env.execute("true", timeout=1800)
            soon(lambda: cloud.box()["expires"] >= time.time() + 1800)
            # E2B refuses that much at once; then it is extended again and again.
            assert env.execute("true", timeout=7200).returncode == 0

    def test_it_is_extended_while_in_use(self) -> None:
        async def extensions() -> list[int]:
            asked: list[int] = []
            twice = asyncio.Event()

            async def extend(seconds: int) -> None:
                asked.append(seconds)
                if seconds > 100:
                    raise SandboxStartError("too long")
                if len(asked) >= 4:
                    twice.set()

            life = Life(extend, 1)
            life.expect(50)
            life.expect(1000)
            await asyncio.wait_for(twice.wait(), PATIENCE)
            life.stop()
            return asked

        asked = asyncio.run(extensions())
        assert asked[0] > 1000
        assert asked[1] == 1  # what is refused is replaced by the usual
        assert len(asked) >= 4

    def test_nothing_outlives_a_killed_program_for_long(self, cloud: Cloud) -> None:
        program = subprocess.Popen(
            [sys.executable, "-c", CRASHING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        id = program.stdout.readline().strip()
        with hermitcrab.open("e2b") as env:
            (of_program,) = [each for each in backend.BACKEND.sandboxes() if each.id == id]  # type: ignore[misc]
            assert (of_program.task, of_program.orphaned) == ("crash", False)
            assert of_program.owner == f"pid {program.pid}"
            program.send_signal(signal.SIGKILL)
            program.communicate()
            assert backend.BACKEND.reap is not None
            cloud.fault("DELETE /sandboxes/", status=403)
            assert backend.BACKEND.reap() == []  # the next one removes it
            assert [(each.id, each.orphaned) for each in backend.BACKEND.reap()] == [(id, True)]
            assert [box["id"] for box in cloud.boxes()] == [env.sandbox_id]


class TestPersistence:
    def test_a_task_goes_on(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b", **KEPT) as env:
            say(env, "echo mine >~/file; v=kept")
        assert cloud.boxes() == []
        with hermitcrab.open("e2b", **KEPT) as env:
            assert say(env, "cat ~/file; echo $v") == "mine\nkept"
            say(env, "echo more >>~/file")
            cloud.vanish(env.sandbox_id)
            soon(lambda: bool(env._session.sandbox.lost))
            with pytest.warns(HermitcrabWarning, match="made anew"):
                assert say(env, "cat ~/file; echo $v") == "mine\nkept"
        assert len(cloud.snapshots()) == 1  # the one before it was replaced

    def test_a_snapshot_that_expired(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b", **KEPT) as env:
            say(env, "echo mine >~/file")
        for snapshot in cloud.snapshots():
            cloud.expire_snapshot(snapshot)
        with pytest.warns(HermitcrabWarning, match="begins anew"):
            env = hermitcrab.open("e2b", **KEPT)
        assert say(env, "ls ~") == ""
        env.cleanup()

    def test_it_ends_even_when_it_cannot_be_kept(self, cloud: Cloud) -> None:
        env = hermitcrab.open("e2b", **KEPT)
        cloud.fault("/snapshots$", status=500, times=9)
        with pytest.warns(HermitcrabWarning, match="the task was not kept"):
            env.cleanup()
        assert cloud.boxes() == []

    def test_what_nobody_extends_is_paused_and_not_lost(self, cloud: Cloud) -> None:
        with hermitcrab.open("e2b", **KEPT) as env:
            id = env.sandbox_id
            say(env, "echo mine >~/file")
            cloud.expire(id)
            soon(lambda: bool(env._session.sandbox.lost))
            assert say(env, "cat ~/file") == "mine"
            assert env.sandbox_id == id


class TestShared(Checks):
    backend = "e2b"
    calls = Calls(
        create=CREATE, end="DELETE /sandboxes/", stream=STREAM, snapshot="POST /sandboxes/.*/snapshots$"
    )


class TestDoctor:
    def test_without_the_sdk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "e2b", None)
        health = backend.BACKEND.check()
        assert (health.usable, health.detail) == (False, "the Python package e2b is not installed")
        assert "pip install 'hermitcrab[e2b]'" in health.hint
        with pytest.raises(BackendUnavailable, match=r"hermitcrab\[e2b\]"):
            hermitcrab.open("e2b")

    def test_without_a_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("E2B_API_KEY", raising=False)
        health = backend.BACKEND.check()
        assert (health.usable, health.detail) == (False, "E2B_API_KEY is not set")
        assert "https://e2b.dev/dashboard" in health.hint

    def test_a_key_is_asked_about_and_nothing_is_made(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert backend.BACKEND.check() == (True, "E2B takes the key in E2B_API_KEY", "")
        monkeypatch.setenv("E2B_API_KEY", "e2b_secret")
        health = backend.BACKEND.check()
        assert not health.usable
        assert "refused the key" in health.detail
        assert "e2b_secret" not in health.detail + health.hint
        assert cloud.calls() == ["GET /v2/sandboxes"] * 2

    def test_an_answer_that_does_not_come(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("E2B_API_KEY", wire.KEY)
        monkeypatch.setenv("E2B_API_URL", "http://127.0.0.1:9")
        health = backend.BACKEND.check()
        assert not health.usable
        assert health.detail.startswith("E2B: ")

    def test_what_was_never_set_up_has_nothing_to_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("E2B_API_KEY", raising=False)
        assert backend.BACKEND.sandboxes is not None
        assert backend.BACKEND.sandboxes() == []


def test_the_documentations_examples_run(cloud: Cloud) -> None:
    text = (Path(__file__).parent.parent / "docs" / "e2b.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("hello\ncrab\n\n", "")
    assert cloud.boxes() == []


class TestFailures:
    def test_every_exception_of_the_sdk_has_a_meaning(self) -> None:
        known, found = failures.meanings(), 0
        for module in pkgutil.walk_packages(e2b.__path__, "e2b."):
            for _, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                if issubclass(each, Exception) and each.__module__.startswith("e2b"):
                    found += 1
                    assert any(base in known for base in each.__mro__), each
        assert found > 20

    @pytest.mark.parametrize(
        ("passing", "repeatable", "calls"), [(True, True, 4), (True, False, 1), (False, True, 1)]
    )
    def test_what_may_be_repeated_is(self, passing: bool, repeatable: bool, calls: int) -> None:
        async def attempts() -> int:
            count = 0

            async def call() -> None:
                nonlocal count
                count += 1
                raise OSError("no")

            def understood(error: Exception) -> Failure:
                return Failure(SandboxStartError(str(error)), passing=passing, retry_after=0)

            with pytest.raises(SandboxError):
                await persistently(call, understood, repeatable=repeatable)
            return count

        assert asyncio.run(attempts()) == calls

    def test_an_exception_that_nobody_knows_is_told(self) -> None:
        failure = failures.understood(KeyError("odd"))
        assert isinstance(failure.error, SandboxStartError)
        assert "KeyError: 'odd'" in str(failure.error)
        assert not failure.passing


def test_it_costs_nothing_before_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_no_thread_per_command(cloud: Cloud) -> None:
    with hermitcrab.open("e2b") as env, warnings.catch_warnings():
        before = threading.active_count()
        running = [env.start("sleep 600") for _ in range(8)]
        soon(lambda: env.execute("pgrep -c sleep").output.strip() == "9")
        assert threading.active_count() <= before
        assert len(running) == 8
        assert os.environ["E2B_API_KEY"] not in repr(env.state)
