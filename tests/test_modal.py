"""Modal by its own SDK, against a server on this machine that really executes: what goes wrong, and what a
user sees of it."""

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

import modal
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hermitcrab
from hermitcrab.backends import modal as backend
from hermitcrab.backends.clouds import owned, stay
from hermitcrab.backends.clouds.life import LEAST
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
from tests.clouds.checks import Calls, Checks, emptied, ran
from tests.clouds.running import Cloud

CREATE = "SandboxCreateV2"
INPUT = "TaskExecStdinWrite"
OUTPUT = "TaskExecStdioRead"
KEPT: Any = {"persistent_filesystem": True, "task_id": "kept"}

CRASHING = """
import sys, hermitcrab
env = hermitcrab.open('modal', task_id='a crash/' + 'é' * 40)
print(env.sandbox_id, flush=True)
sys.stdin.read()
"""
CHECKING = """
from hermitcrab.backends import registry
print(registry.get('modal').check())
"""
IMPORTING = """
import sys, hermitcrab
from hermitcrab.backends import registry
registry.get('modal')
print('modal' in sys.modules)
"""


@pytest.fixture
def cloud(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with emptied("modal", monkeypatch) as cloud:
        yield cloud


def made(cloud: Cloud) -> int:
    return cloud.calls().count(CREATE)


def break_output(cloud: Cloud) -> None:
    """The way to a sandbox that goes on. What is merely cut, the SDK mends by itself."""
    cloud.fault(OUTPUT, status=403, times=2)
    assert cloud.cut(OUTPUT) == 2


def lose(cloud: Cloud, env: hermitcrab.Environment) -> None:
    break_output(cloud)
    soon(lambda: bool(env._session.sandbox.lost))
    cloud.heal()


class TestShared(Checks):
    backend = "modal"
    calls = Calls(create=CREATE, end="SandboxTerminateV2", stream=OUTPUT, snapshot="TaskSnapshotFilesystem")

    fatal = 403

    def break_pipe(self, cloud: Cloud) -> None:
        break_output(cloud)


class TestStart:
    def test_a_rate_limit_is_waited_for(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=429, headers={"Retry-After": "1"})
        cloud.fault(CREATE, status=429)
        began = time.monotonic()
        with hermitcrab.ModalEnvironment() as env:
            assert time.monotonic() - began >= 1
            assert say(env, "echo fine") == "fine"
        assert made(cloud) == 3

    def test_an_answer_that_was_lost_makes_no_second_sandbox(self, cloud: Cloud) -> None:
        cloud.fault(CREATE, status=500, afterwards=True)
        cloud.fault(CREATE, cut_after=0)
        with hermitcrab.open("modal"):
            assert made(cloud) == 3
            assert len(cloud.boxes()) == 1

    @pytest.mark.parametrize("status", [500, 429])
    def test_it_gives_up_after_three_more_attempts(self, cloud: Cloud, status: int) -> None:
        cloud.fault(CREATE, status=status, times=9, message="the cupboard is bare")
        with pytest.raises(SandboxStartError, match="Modal: the cupboard is bare"):
            hermitcrab.open("modal")
        assert made(cloud) == 4

    def test_what_stays_wrong_fails_at_once(self, cloud: Cloud) -> None:
        with pytest.raises(SandboxStartError, match=r"manifest unknown: FROM no-such:1"):
            hermitcrab.open("modal:no-such:1")
        with pytest.raises(SandboxStartError, match="Image with ID im-gone not found"):
            hermitcrab.open("modal:im-gone")
        assert made(cloud) == 0

    def test_a_sandbox_that_stays_pending(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(stay, "_NEWS_EVERY", 0.2)
        cloud.fault("TaskExecStart", pending=True, times=99)
        with (
            caplog.at_level(logging.INFO, "hermitcrab.clouds"),
            pytest.raises(SandboxStartError, match=r"starting a sandbox at Modal took longer than 4 s"),
        ):
            hermitcrab.open("modal", start_timeout=4)
        assert "starting a sandbox at Modal: 0.4 s so far" in caplog.messages
        assert cloud.boxes() == []

    def test_one_that_comes_up_when_nobody_waits_any_more_is_removed(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stay, "_UNDOING_PATIENCE", 0.1)
        cloud.fault(CREATE, status=429, headers={"Retry-After": "2"})
        with pytest.raises(SandboxStartError, match="took longer than 1 s"):
            hermitcrab.open("modal", start_timeout=1)
        soon(lambda: any("SandboxTerminate" in call for call in cloud.calls()))
        soon(lambda: cloud.boxes() == [])

    def test_a_sandbox_in_which_nothing_starts_is_removed(self, cloud: Cloud) -> None:
        cloud.fault("TaskExecStart", status=403, times=9)
        with pytest.raises(SandboxStartError):
            hermitcrab.open("modal")
        assert cloud.boxes() == []

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
            hermitcrab.open("modal", cpu=0.5004).cleanup()
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
                hermitcrab.open("modal", **{name: value})
        assert cloud.calls() == []


class TestLoss:
    def test_a_stream_that_is_cut_is_followed_further(self, cloud: Cloud) -> None:
        with hermitcrab.open("modal") as env:
            streamed = env.stream("echo once >>/tmp/ran; echo before; read; echo after", stdin=True)
            read_until(streamed, "before")
            assert cloud.cut(OUTPUT) == 2
            cloud.fault(OUTPUT, status=503, times=2)
            streamed.write(b"\n")
            read_until(streamed, "after")
            assert streamed.wait(PATIENCE).returncode == 0
            assert ran(env, "once") == 1
        assert cloud.calls().count("TaskExecStart") == 1

    def test_a_stream_that_cannot_be_followed(self, cloud: Cloud) -> None:
        with hermitcrab.open("modal") as env:
            say(env, "v=kept; cd /usr; f() { echo $v; }")
            streamed = env.stream("echo once >>/tmp/ran; echo before; sleep 600; echo after")
            read_until(streamed, "before")
            lose(cloud, env)
            with pytest.raises(SandboxLost, match="the connection to it broke") as caught:
                streamed.wait(PATIENCE)
            assert caught.value.partial_output == "before\n"
            assert say(env, "f; pwd") == "kept\n/usr"
            assert ran(env, "once") == 1
            # Nothing of the lost agent is left; one `sleep` is the sandbox's own.
            soon(lambda: say(env, "pgrep -c sleep") == "1" and cloud.box()["programs"] == 1)
        assert made(cloud) == 1

    @pytest.mark.parametrize(
        "fault", [{"status": 429}, {"status": 500, "afterwards": True}, {"cut_after": 0}]
    )
    def test_input_is_sent_again_and_comes_once(self, cloud: Cloud, fault: Any) -> None:
        """Each call says where in the input it belongs."""
        with hermitcrab.open("modal") as env:
            cloud.fault(INPUT, times=2, **fault)
            assert say(env, "echo once >>/tmp/ran; echo fine") == "fine"
            assert ran(env, "once") == 1

    def test_input_that_is_refused_for_good(self, cloud: Cloud) -> None:
        with hermitcrab.open("modal") as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault(INPUT, status=403, message="go away")
            with pytest.raises(SandboxLost, match="the connection to it broke: Modal: go away"):
                env.execute("echo never >>/tmp/ran", timeout=PATIENCE)
            assert say(env, "echo $v") == "kept"
            assert ran(env, "never") == 0

    @pytest.mark.parametrize("way", ["vanish", "stop"])
    def test_a_sandbox_that_is_gone_between_two_commands(self, cloud: Cloud, way: str) -> None:
        with hermitcrab.open("modal") as env:
            say(env, "v=kept; cd /usr; touch /tmp/mine")
            getattr(cloud, way)(env.sandbox_id)
            soon(lambda: bool(env._session.sandbox.lost))
            with pytest.warns(
                HermitcrabWarning, match="is gone at Modal; the session goes on in .*, made anew"
            ):
                assert say(env, "echo $v; pwd; ls /tmp") == "kept\n/usr"
            assert env.sandbox_id in [box["id"] for box in cloud.boxes()]
            assert made(cloud) == 2

    def test_where_warnings_are_errors_a_loss_is_told_once(
        self, cloud: Cloud, caplog: pytest.LogCaptureFixture
    ) -> None:
        with hermitcrab.open("modal") as env:
            say(env, "v=kept")
            for goes_on in (True, False):
                cloud.vanish(env.sandbox_id)
                soon(lambda: bool(env._session.sandbox.lost))
                with pytest.raises(SandboxLost, match="made anew"):
                    env.execute("true")
                if goes_on:
                    assert say(env, "echo $v") == "kept"
        assert cloud.boxes() == []
        assert "was not removed" not in caplog.text

    def test_a_sandbox_that_ended_under_a_command(self, cloud: Cloud) -> None:
        with hermitcrab.open("modal") as env, meanwhile(env, "touch /tmp/up; sleep 600") as future:
            soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
            cloud.stop(env.sandbox_id)
            error = future.exception(PATIENCE)
            assert isinstance(error, SandboxLost)
            assert "ended at Modal: somebody ended it, or its memory ran out" in str(error)

    def test_a_provider_that_is_down_when_the_sandbox_is_needed(self, cloud: Cloud) -> None:
        with hermitcrab.open("modal") as env:
            say(env, "v=kept; touch /tmp/ran")
            lose(cloud, env)
            cloud.fault("SandboxWaitV2", status=500, times=4, message="not today")
            with pytest.raises(SandboxStartError, match="not today"):
                env.execute("echo never >>/tmp/ran")
            assert say(env, "echo $v; ls /tmp") == "kept\nran"
            assert ran(env, "never") == 0
        assert cloud.boxes() == []

    def test_a_control_plane_that_is_down_disturbs_nobody(
        self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(machine, "_ASKED_AGAIN", 0.05)
        with hermitcrab.open("modal") as env:
            say(env, "v=kept")
            cloud.fault("V2$", status=403, times=20)
            cloud.cut("SandboxWaitV2")
            soon(lambda: cloud.calls().count("SandboxWaitV2") > 3)
            assert say(env, "echo $v") == "kept"
            cloud.heal()

    def test_a_sandbox_that_cannot_be_ended_ends_by_itself(
        self, cloud: Cloud, caplog: pytest.LogCaptureFixture
    ) -> None:
        env = hermitcrab.open("modal")
        assert cloud.box()["expires"] > time.time() + LONGEST_LIFE - 60
        cloud.fault("SandboxTerminateV2", status=500, times=9)
        env.cleanup()
        assert f"the sandbox {env.sandbox_id} was not removed, and ends by itself in 300 s" in caplog.text
        # Nothing of ours runs in it any more.
        soon(lambda: cloud.box()["expires"] <= time.time() + LEAST)


class TestLife:
    def test_its_end_is_a_restart(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        env = hermitcrab.open("modal", task_id="long")
        id = env.sandbox_id
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
        soon(lambda: bool(env._session.sandbox.lost))
        with pytest.warns(HermitcrabWarning, match=f"the time of {id} was over; its files are those of"):
            assert say(env, "echo $v; cat ~/file") == "kept\nmine\nmore"
        assert env.sandbox_id == cloud.box()["id"] != id
        env.detach()
        with hermitcrab.open("modal", task_id="long") as env:
            assert say(env, "cat ~/file") == "mine\nmore"
        assert cloud.boxes() == []

    def test_nothing_outlives_a_killed_program_for_long(self, cloud: Cloud) -> None:
        program = subprocess.Popen(
            [sys.executable, "-c", CRASHING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout is not None
        id = program.stdout.readline().strip()
        others = [hermitcrab.open("modal") for _ in range(2)]  # the list has pages
        assert backend.BACKEND.sandboxes is not None
        assert backend.BACKEND.reap is not None
        (of_program,) = [each for each in backend.BACKEND.sandboxes() if each.id == id]
        assert (of_program.task, of_program.orphaned) == ("a crash/" + "é" * 40, False)
        assert of_program.owner == f"pid {program.pid}"
        program.send_signal(signal.SIGKILL)
        program.communicate()
        assert [(each.id, each.orphaned) for each in backend.BACKEND.reap()] == [(id, True)]
        assert {box["id"] for box in cloud.boxes()} == {env.sandbox_id for env in others}
        for env in others:
            env.cleanup()


class TestPersistence:
    def test_a_task_goes_on(self, cloud: Cloud) -> None:
        with hermitcrab.open("modal", **KEPT) as env:
            say(env, "echo mine >~/file; v=kept")
        assert cloud.boxes() == []
        with hermitcrab.open("modal", **KEPT) as env:
            assert say(env, "cat ~/file; echo $v") == "mine\nkept"
            say(env, "echo more >>~/file")
            cloud.vanish(env.sandbox_id)
            soon(lambda: bool(env._session.sandbox.lost))
            with pytest.warns(HermitcrabWarning, match="made anew"):
                assert say(env, "cat ~/file; echo $v") == "mine\nkept"
        assert len(cloud.snapshots()) == 1  # the one before it was replaced

    def test_a_snapshot_that_expired(self, cloud: Cloud) -> None:
        with hermitcrab.open("modal", **KEPT) as env:
            say(env, "echo mine >~/file")
        for snapshot in cloud.snapshots():
            cloud.expire_snapshot(snapshot)
        with pytest.warns(HermitcrabWarning, match="begins anew"):
            env = hermitcrab.open("modal", **KEPT)
        assert say(env, "test ! -e ~/file && echo anew") == "anew"
        env.cleanup()


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
        monkeypatch.setitem(sys.modules, "modal", None)
        health = backend.BACKEND.check()
        assert (health.usable, health.detail) == (False, "the Python package modal is not installed")
        assert "pip install 'hermitcrab[modal]'" in health.hint
        with pytest.raises(BackendUnavailable, match=r"hermitcrab\[modal\]"):
            hermitcrab.open("modal")

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


def test_the_documentations_examples_run(cloud: Cloud) -> None:
    text = (Path(__file__).parent.parent / "docs" / "modal.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    command = [sys.executable, "-W", "error", "-c", example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("hello\ncrab\n\n", "")
    assert cloud.boxes() == []


class TestFailures:
    def test_every_exception_of_the_sdk_has_a_meaning(self) -> None:
        known, found = failures.meanings(), 0
        elsewhere = re.compile(
            r"modal\..*(_vendor|_runtime|builder|cli|ipython|_testing|__main__|_entrypoint)\b"
        )
        for module in pkgutil.walk_packages(modal.__path__, "modal."):
            if elsewhere.match(module.name):
                continue  # what runs at Modal, or on a terminal
            for _, each in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
                ours = each.__module__.startswith("modal.") and not elsewhere.match(each.__module__)
                private = issubclass(each, Warning) or each.__name__.startswith("_Cli")
                if ours and issubclass(each, Exception) and not private:
                    found += 1
                    assert any(base in known for base in each.__mro__), each
        assert found > 40

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


def test_it_costs_nothing_before_it_is_used() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "False\n"


def test_no_thread_per_command(cloud: Cloud) -> None:
    with hermitcrab.open("modal") as env, warnings.catch_warnings():
        before = threading.active_count()
        commands = [env.start("sleep 600") for _ in range(8)]
        soon(lambda: env.execute("pgrep -c sleep").output.strip() == "9")
        assert threading.active_count() <= before
        assert len(commands) == 8
        assert env.execute("sleep 600", timeout=0.2).returncode == 124
        commands[0].interrupt()
        assert commands[0].wait(PATIENCE).returncode == 130
        assert os.environ["MODAL_TOKEN_SECRET"] not in repr(env.state)
    assert cloud.calls().count("TaskExecStart") == 1


def test_it_serves_a_loop_of_the_users_own(cloud: Cloud) -> None:
    async def both() -> list[str]:
        async with await hermitcrab.aopen("modal") as one, await hermitcrab.aopen("modal") as two:
            results = await asyncio.gather(one.execute("echo one"), two.execute("echo two"))
            return [each.output for each in results]

    assert asyncio.run(both()) == ["one\n", "two\n"]
    assert cloud.boxes() == []


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
