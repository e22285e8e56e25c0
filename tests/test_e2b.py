"""E2B by its own SDK, against a server on this machine that really executes: what goes wrong, and what a user
sees of it."""

from __future__ import annotations

import asyncio
import logging
import time

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
from hermitcrab.testing.inside import PATIENCE, say, soon
from tests.clouds import e2b as wire
from tests.clouds.keeping import Keeping
from tests.clouds.losing import Losing, LosingInput
from tests.clouds.provided import KEPT, Calls, Provided, cannot_start, fresh, lost, ran
from tests.clouds.running import Cloud
from tests.clouds.starting import Starting

CREATE = "POST /v2/sandboxes$"
INPUT = "POST /process.Process/SendInput"
STREAM = "POST /process.Process/Start"

cloud = fresh("e2b")


class OfE2B(Provided):
    backend, title, sdk, package = "e2b", "E2B", e2b, "e2b"
    environment = hermitcrab.E2BEnvironment
    secret = "E2B_API_KEY"
    failed = "E2B: {status}: .*{words}"
    unstarted = "no way in"
    gone = "is gone at E2B: somebody ended it, or its time was over"
    made_from = "base"
    calls = Calls(
        create=CREATE,
        end="DELETE /sandboxes/",
        start=STREAM,
        stream=STREAM,
        snapshot="POST /sandboxes/.*/snapshots$",
    )


class TestStart(OfE2B, Starting):
    explained_by, exceptions = failures, 20

    def test_what_stays_wrong_fails_at_once(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match="template 'no-such' not found"):
            hermitcrab.open("e2b:no-such")
        assert self.made(cloud) == 1
        with pytest.raises(ConfigError, match="invalid username: 'nobody-here'"):
            self.open(user="nobody-here")
        cloud.fault(INPUT, status=500, message="down")
        with pytest.raises(SandboxStartError, match=r"the connection to it broke: .*down"):
            self.open()
        assert cloud.boxes() == []

    def test_a_wrong_key(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("E2B_API_KEY", "e2b_secret")
        with pytest.raises(BackendUnavailable, match=r"refused the key in E2B_API_KEY.*dashboard") as caught:
            self.open()
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
            self.open(start_timeout=0.7)
        assert "starting a sandbox at E2B: 0.4 s so far" in caplog.messages

    def test_what_is_set_arrives(self, cloud: Cloud) -> None:
        with self.open(network=False, user="root", task_id="t1", cwd="~/made") as env:
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
            self.open(disk=9)
        assert cloud.calls() == []


class TestLoss(OfE2B, Losing, LosingInput):
    input = INPUT

    def test_input_that_was_turned_away_is_sent_again(self, cloud: Cloud) -> None:
        with self.open() as env:
            cloud.fault(INPUT, status=429, times=2)
            assert say(env, "echo once >>/tmp/ran; echo fine") == "fine"
            assert ran(env, "once") == 1

    def test_a_sandbox_that_was_paused_between_two_commands(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; touch /tmp/mine")
            cloud.stop(env.sandbox_id, "paused")
            assert env.sandbox_id == cloud.box()["id"]
            lost(env)
            assert say(env, "echo $v; ls /tmp") == "kept\nmine"
        assert self.made(cloud) == 1

    def test_a_provider_that_is_down_when_the_sandbox_is_needed(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault("/connect$", status=500, times=4, message="not today")
            cloud.stop(env.sandbox_id, "paused")
            lost(env)
            cannot_start(env, "not today")
            assert say(env, "echo $v; ls /tmp") == "kept\nran"

    def test_a_sandbox_that_cannot_be_entered_is_kept(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; touch /tmp/mine")
            cloud.fault(STREAM, status=500, times=4)
            cloud.cut(STREAM)
            lost(env)
            with pytest.raises(SandboxStartError):
                env.execute("touch /tmp/never")
            assert say(env, "echo $v; ls /tmp") == "kept\nmine"
        assert cloud.boxes() == []

    def test_after_a_loss_cleanup_still_removes_it(self, cloud: Cloud) -> None:
        env = self.open()
        cloud.cut(STREAM)
        lost(env)
        env.cleanup()
        assert cloud.boxes() == []


class TestLife(OfE2B):
    def test_it_is_never_shorter_than_a_commands(self, cloud: Cloud) -> None:
        with self.open() as env:
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


class TestPersistence(OfE2B, Keeping):
    def test_what_nobody_extends_is_paused_and_not_lost(self, cloud: Cloud) -> None:
        with self.open(**KEPT) as env:
            id = env.sandbox_id
            say(env, "echo mine >~/file")
            cloud.expire(id)
            lost(env)
            assert say(env, "cat ~/file") == "mine"
            assert env.sandbox_id == id


class TestDoctor:
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


class TestFailures:
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
