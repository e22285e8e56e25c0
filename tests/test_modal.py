"""Modal by its own SDK, against a server on this machine that really executes: what goes wrong, and what a
user sees of it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import modal
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hermitcrab
from hermitcrab.backends import modal as backend
from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.modal import failures, machine
from hermitcrab.backends.modal.config import LONGEST_LIFE
from hermitcrab.backends.modal.tags import LONGEST, labels_of, tags_of
from hermitcrab.errors import (
    BackendUnavailable,
    ConfigError,
    HermitcrabWarning,
    SandboxLost,
    SandboxStartError,
)
from hermitcrab.testing.inside import PATIENCE, meanwhile, read_until, say, soon
from tests.clouds.keeping import Keeping
from tests.clouds.losing import Losing
from tests.clouds.provided import Calls, Provided, cannot_start, fresh, lost, ran
from tests.clouds.running import Cloud
from tests.clouds.starting import Starting

CREATE = "SandboxCreateV2"
INPUT = "TaskExecStdinWrite"
OUTPUT = "TaskExecStdioRead"
CHECKING = """
from hermitcrab.backends import registry
print(registry.get('modal').check())
"""

cloud = fresh("modal")


class OfModal(Provided):
    backend, title, sdk, package = "modal", "Modal", modal, "modal"
    environment = hermitcrab.ModalEnvironment
    secret = "MODAL_TOKEN_SECRET"
    failed = "Modal: {words}"
    unstarted = "Modal: no way in"
    gone = "is gone at Modal"
    made_from = ""
    fatal = 403
    calls = Calls(
        create=CREATE,
        end="SandboxTerminateV2",
        start="TaskExecStart",
        stream=OUTPUT,
        snapshot="TaskSnapshotFilesystem",
    )

    def break_pipe(self, cloud: Cloud) -> None:
        cloud.fault(OUTPUT, status=403, times=2)
        assert cloud.cut(OUTPUT) == 2


class TestStart(OfModal, Starting):
    explained_by, exceptions = failures, 40
    elsewhere = (  # what runs at Modal or on a terminal, and warnings
        r"modal\..*((_vendor|_runtime|builder|cli|ipython|_testing|__main__|_entrypoint)\b|"
        r"\.(_Cli\w+|\w+Warning|DeprecationError)$)"
    )

    def test_what_stays_wrong_fails_at_once(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match=r"manifest unknown: FROM no-such:1"):
            hermitcrab.open("modal:no-such:1")
        with pytest.raises(SandboxStartError, match="Image with ID im-gone not found"):
            hermitcrab.open("modal:im-gone")
        assert self.made(cloud) == 0

    def test_a_sandbox_that_stays_pending(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(stay, "_NEWS_EVERY", 0.2)
        cloud.fault("TaskExecStart", pending=True, times=99)
        with (
            caplog.at_level(logging.INFO, "hermitcrab.clouds"),
            pytest.raises(SandboxStartError, match=r"starting a sandbox at Modal took longer than 4 s"),
        ):
            self.open(start_timeout=4)
        assert "starting a sandbox at Modal: 0.4 s so far" in caplog.messages
        assert cloud.boxes() == []

    def test_one_that_comes_up_when_nobody_waits_any_more_is_removed(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stay, "_UNDOING_PATIENCE", 0.1)
        cloud.fault(CREATE, status=429, headers={"Retry-After": "2"})
        with pytest.raises(SandboxStartError, match="took longer than 1 s"):
            self.open(start_timeout=1)
        soon(lambda: any("SandboxTerminate" in call for call in cloud.calls()))
        soon(lambda: cloud.boxes() == [])

    def test_what_is_set_arrives(self, cloud: Cloud) -> None:
        options: Any = {"network": False, "region": "eu", "task_id": "t1", "max_lifetime": 400}
        with hermitcrab.ModalEnvironment("debian:12", "~/made", 60, 0.5, 256, **options) as env:
            box = cloud.box()
            assert not box["network"]
            assert labels_of(box["labels"])["hermitcrab.task"] == "t1"
            asked = {name: box["settings"][name] for name in ("milli_cpu", "memory", "regions", "idle")}
            assert asked == {"milli_cpu": 500, "memory": 256, "regions": ["eu"], "idle": 400}
            assert say(env, "id -un; pwd; echo $MODAL_SANDBOX_ID") == f"root\n/root/made\n{box['id']}"
            assert say(env, "tail -n +3 /proc/net/dev | wc -l") == "1"
            assert env.sandbox_id == box["id"]
        assert cloud.boxes() == []

    def test_what_modal_does_not_take(self, cloud: Cloud) -> None:
        with pytest.warns(HermitcrabWarning, match="cpu: Modal counts thousandths: 0.5, not 0.5004"):
            self.open(cpu=0.5004).cleanup()
        cloud.calls(forget=True)
        wrong: dict[str, tuple[Any, str]] = {
            "disk": (9, "takes nothing: Modal has no limit of the disk"),
            "cpu": (0.01, "0.125"),
            "memory": (64, "128"),
            "image": ("debian 12", "takes a name without spaces"),
            "max_lifetime": (90000, "takes 86400 at most"),
        }
        for name, (value, words) in wrong.items():
            with pytest.raises(ConfigError, match=f"{name}: .*{words}"):
                self.open(**{name: value})
        assert cloud.calls() == []


class TestLoss(OfModal, Losing):
    def test_a_stream_that_is_cut_is_followed_further(self, cloud: Cloud) -> None:
        with self.open() as env:
            streamed = env.stream("echo once >>/tmp/ran; echo before; read; echo after", stdin=True)
            read_until(streamed, "before")
            assert cloud.cut(OUTPUT) == 2
            cloud.fault(OUTPUT, status=503, times=2)
            streamed.write(b"\n")
            read_until(streamed, "after")
            assert streamed.wait(PATIENCE).returncode == 0
            assert ran(env, "once") == 1
        assert cloud.calls().count("TaskExecStart") == 1

    @pytest.mark.parametrize(
        "fault", [{"status": 429}, {"status": 500, "afterwards": True}, {"cut_after": 0}]
    )
    def test_input_is_sent_again_and_comes_once(self, cloud: Cloud, fault: Any) -> None:
        """Each call says where in the input it belongs."""
        with self.open() as env:
            cloud.fault(INPUT, times=2, **fault)
            assert say(env, "echo once >>/tmp/ran; echo fine") == "fine"
            assert ran(env, "once") == 1

    def test_input_that_is_refused_for_good(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault(INPUT, status=403, message="go away")
            with pytest.raises(SandboxLost, match="the connection to it broke: Modal: go away"):
                env.execute("echo never >>/tmp/ran", timeout=PATIENCE)
            assert say(env, "echo $v") == "kept"
            assert ran(env, "never") == 0

    def test_a_sandbox_that_was_stopped_between_two_commands(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; cd /usr; touch /tmp/mine")
            cloud.stop(env.sandbox_id)
            lost(env)
            with pytest.warns(
                HermitcrabWarning, match="is gone at Modal; the session goes on in .*, made anew"
            ):
                assert say(env, "echo $v; pwd; ls /tmp") == "kept\n/usr"
            assert env.sandbox_id in [box["id"] for box in cloud.boxes()]
            assert self.made(cloud) == 2

    def test_where_warnings_are_errors_a_loss_is_told_once(
        self, cloud: Cloud, caplog: pytest.LogCaptureFixture
    ) -> None:
        with self.open() as env:
            say(env, "v=kept")
            for goes_on in (True, False):
                cloud.vanish(env.sandbox_id)
                lost(env)
                with pytest.raises(SandboxLost, match="made anew"):
                    env.execute("true")
                if goes_on:
                    assert say(env, "echo $v") == "kept"
        assert cloud.boxes() == []
        assert "was not removed" not in caplog.text

    def test_a_sandbox_that_ended_under_a_command(self, cloud: Cloud) -> None:
        with self.open() as env, meanwhile(env, "touch /tmp/up; sleep 600") as future:
            soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
            cloud.stop(env.sandbox_id)
            error = future.exception(PATIENCE)
            assert isinstance(error, SandboxLost)
            assert "ended at Modal: somebody ended it, or its memory ran out" in str(error)

    def test_a_provider_that_is_down_when_the_sandbox_is_needed(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; touch /tmp/ran")
            self.break_pipe(cloud)
            lost(env)
            cloud.heal()
            cloud.fault("SandboxWaitV2", status=500, times=4, message="not today")
            cannot_start(env, "not today")
            assert say(env, "echo $v; ls /tmp") == "kept\nran"
        assert cloud.boxes() == []

    def test_a_control_plane_that_is_down_disturbs_nobody(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "_ASKED_AGAIN", 0.05)
        with self.open() as env:
            say(env, "v=kept")
            cloud.fault("V2$", status=403, times=20)
            cloud.cut("SandboxWaitV2")
            soon(lambda: cloud.calls().count("SandboxWaitV2") > 3)
            assert say(env, "echo $v") == "kept"
            cloud.heal()


class TestLife(OfModal):
    def test_its_end_is_a_restart(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        env = self.open(task_id="long")
        id = env.sandbox_id
        assert cloud.box()["expires"] > time.time() + LONGEST_LIFE - 60
        say(env, "v=kept; echo mine >~/file; echo $HOME")
        env.execute("true", timeout=1800)
        assert cloud.snapshots() == []
        over = time.time() + LONGEST_LIFE
        with monkeypatch.context() as later:
            later.setattr(machine, "_now", lambda: over - 1000)
            env.execute("true", timeout=1900)  # which Modal would not live to see
            soon(lambda: len(cloud.snapshots()) == 1)
            (before,) = cloud.snapshots()
            say(env, "echo more >>~/file")
            later.setattr(machine, "_now", lambda: over - 400)
            env.execute("true", timeout=3000)
            soon(lambda: len(cloud.snapshots()) == 1 and cloud.snapshots() != [before])
        cloud.expire(id)
        lost(env)
        with pytest.warns(HermitcrabWarning, match=f"the time of {id} was over; its files are those of"):
            assert say(env, "echo $v; cat ~/file") == "kept\nmine\nmore"
        assert env.sandbox_id == cloud.box()["id"] != id
        env.detach()
        with self.open(task_id="long") as env:
            assert say(env, "cat ~/file") == "mine\nmore"
        assert cloud.boxes() == []


class TestPersistence(OfModal, Keeping):
    """Nothing of its own."""


class TestDoctor:
    def test_what_is_missing(self, quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in os.environ.keys() & {"MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"}:
            monkeypatch.delenv(name)
        settings = quiet_home / "modal.toml"
        monkeypatch.setenv("MODAL_CONFIG_PATH", str(settings))
        health = backend.BACKEND.check()
        assert (health.usable, health.detail) == (False, "there is no token for Modal")
        assert "modal token new" in health.hint
        assert backend.BACKEND.sandboxes is not None
        assert backend.BACKEND.sandboxes() == []
        settings.write_text("[default\n")
        assert f"{settings} cannot be read" in backend.BACKEND.check().detail
        settings.write_text("[default]\ntoken_id = 'ak-1'\n")
        assert backend._MODAL.missing() is None

    def test_a_token_is_asked_about_and_nothing_is_made(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert backend.BACKEND.check() == (True, "Modal takes the token", "")
        assert cloud.calls() == ["ClientHello"]
        # The SDK keeps its first token for the life of a program.
        monkeypatch.setenv("MODAL_TOKEN_SECRET", "as-secret")
        told = subprocess.run(
            [sys.executable, "-c", CHECKING], capture_output=True, text=True, timeout=60
        ).stdout
        assert "Modal did not take the token (Token ID is malformed)" in told
        assert "as-secret" not in told
        assert set(cloud.calls()) == {"ClientHello"}

    def test_an_answer_that_does_not_come(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owned, "_ASK_SECONDS", 0.3)
        cloud.fault("ClientHello", pending=True)
        health = backend.BACKEND.check()
        assert (health.usable, health.detail) == (False, "Modal does not answer within 0.3 s")


class TestFailures:
    def test_words_are_modals_own(self) -> None:
        told = {
            modal.exception.AuthError("no"): (BackendUnavailable, "Modal did not take the token (no)"),
            modal.exception.InvalidError("no"): (ConfigError, "Modal: no"),
            modal.exception.ConflictError("no"): (SandboxStartError, "Modal: no"),
            modal.exception.SandboxTimeoutError(): (SandboxLost, "Modal: SandboxTimeoutError"),
            KeyError("odd"): (SandboxStartError, "Modal: KeyError: 'odd'"),
        }
        for error, (kind, words) in told.items():
            failure = failures.understood(error)
            assert type(failure.error) is kind
            assert words in str(failure.error)
            assert not failure.passing
        assert failures.understood(modal.exception.ResourceExhaustedError("slowly")).refused
        assert failures.understood(OSError("gone")).passing


@settings(max_examples=40)
@given(st.dictionaries(st.from_regex(r"hermitcrab(\.[a-z]{1,9})?", fullmatch=True), st.text()))
def test_labels_survive_as_tags(labels: dict[str, str]) -> None:
    tags = tags_of(labels)
    for each in (*tags, *tags.values()):
        assert re.fullmatch(r"[A-Za-z0-9._-]+", each)
        assert len(each) <= LONGEST
    assert labels_of(dict(reversed(tags.items()))) == labels


def test_the_server_refuses_what_it_does_not_know(cloud: Cloud) -> None:
    async def ask() -> None:
        app = await modal.App.lookup.aio("mine", create_if_missing=True)
        with pytest.raises(modal.exception.InvalidError, match=r"does not know definition\.verbose"):
            await modal.Sandbox.create.aio(app=app, verbose=True)
        sandbox = await modal.Sandbox.create.aio(app=app)
        with pytest.raises(modal.exception.UnimplementedError):
            await sandbox.set_tags.aio({"name": "value"})
        await sandbox.terminate.aio()

    asyncio.run(ask())
    assert backend.BACKEND.sandboxes is not None
    assert backend.BACKEND.sandboxes() == []
