"""What every provider owes, beyond the contract suite: one class, which the module of each provider's tests
subclasses with the names of its calls. The subclass's module has the fixture `cloud`."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import cli, sessions, snapshots
from hermitcrab.backends import registry
from hermitcrab.backends.clouds import retry, tasks
from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.cli import probe
from hermitcrab.core.protocols import Listed
from hermitcrab.errors import HermitcrabWarning, SandboxLost, UnsupportedCapability
from hermitcrab.testing.inside import PATIENCE, read_until, say, soon, works
from tests.clouds import running
from tests.clouds.running import Cloud

EVERY_BYTE = bytes(range(256)) * 4096 + b"\r\n\x04\x03\x00tail without a line break"


@contextmanager
def emptied(provider: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A provider with nothing in it, and the way to it. Retries come quickly."""
    monkeypatch.setattr(retry, "PAUSES", (0.02, 0.04, 0.06))
    cloud = running.cloud(provider)
    for name, value in cloud.variables.items():
        monkeypatch.setenv(name, value)
    for snapshot in cloud.snapshots():
        cloud.expire_snapshot(snapshot)
    cloud.calls(forget=True)
    yield cloud
    cloud.heal()
    for box in cloud.boxes():
        cloud.vanish(box["id"])


def ran(env: hermitcrab.Environment, mark: str) -> int:
    """How often a command ran that leaves such a line."""
    return say(env, "cat /tmp/ran").splitlines().count(mark)


@dataclass(frozen=True)
class Calls:
    """What a provider calls what we ask of it: patterns of "METHOD /path", as its server notes them."""

    create: str
    end: str
    stream: str
    """What carries a program's output."""
    snapshot: str = ""
    """Empty where a provider has none."""


class Checks:
    """`class TestShared(Checks): backend, calls = ..., Calls(...)`."""

    backend: str
    calls: Calls
    fatal: int = 500
    """A status with which a call stays wrong, however often an SDK itself tries again."""
    options: dict[str, Any] = {}  # noqa: RUF012 - a class attribute that subclasses replace

    def open(self, **options: Any) -> hermitcrab.Environment:
        return hermitcrab.open(self.backend, **{**self.options, **options})

    def listed(self, task: str) -> list[Listed]:
        """What `hermitcrab ps` shows of a task."""
        sandboxes = registry.get(self.backend).sandboxes
        assert sandboxes is not None
        return [each for each in sandboxes() if each.task == task]

    def reaped(self) -> list[str]:
        reap = registry.get(self.backend).reap
        assert reap is not None
        return [each.id for each in reap()]

    def break_pipe(self, cloud: Cloud) -> None:
        """For good: an SDK may mend what is merely cut."""
        assert cloud.cut(self.calls.stream)

    def positions(self, cloud: Cloud, *patterns: str) -> list[int]:
        """When each was first called."""
        calls = cloud.calls()
        return [
            next(number for number, call in enumerate(calls) if re.search(each, call)) for each in patterns
        ]

    def test_input_arrives_exact_whatever_it_is(self, cloud: Cloud) -> None:
        with self.open() as env:
            assert cloud.box()["expires"] >= time.time() + LEAST - 30
            expected = sha256(EVERY_BYTE).hexdigest()
            assert say(env, "sha256sum | cut -d' ' -f1", stdin_data=EVERY_BYTE) == expected
            assert say(env, "cat | wc -c", stdin_data=b"") == "0"
            assert say(env, "wc -c; echo over", stdin_data=b"\x00") == "1\nover"

    def test_files_come_back_then_it_is_kept_then_it_ends(self, cloud: Cloud, tmp_path: Path) -> None:
        if not self.calls.snapshot:
            pytest.skip("this provider has no snapshots")
        project = tmp_path / "project"
        project.mkdir()
        (project / "file").write_text("from here")
        options = {"sync": [f"{project}:~/project:back"], "persistent_filesystem": True, "task_id": "order"}
        env = self.open(**options)
        say(env, "cd ~/project && cat file && echo from there >file")
        cloud.calls(forget=True)
        env.cleanup()
        assert (project / "file").read_text() == "from there\n"
        kept, ended = self.positions(cloud, self.calls.snapshot, self.calls.end)
        assert kept < ended
        (first,) = snapshots.list_snapshots()
        # Whatever fails on the way, the rest is done, and what was kept last stays.
        env = self.open(**options)
        say(env, "echo more >>~/project/file")
        (project / "file").unlink()
        project.rmdir()
        project.write_text("in the way")
        cloud.fault(self.calls.snapshot, status=self.fatal, times=9)
        with pytest.warns(HermitcrabWarning) as warned:
            env.cleanup()
        told = " ".join(str(each.message) for each in warned)
        assert "sync: " in told
        assert "the task was not kept, its last snapshot stays" in told
        assert cloud.boxes() == []
        assert snapshots.list_snapshots() == [first]

    def test_what_can_neither_be_kept_nor_removed_is_not_lost(
        self, cloud: Cloud, caplog: pytest.LogCaptureFixture
    ) -> None:
        if not self.calls.snapshot:
            pytest.skip("this provider has no snapshots")
        kept = {"persistent_filesystem": True, "task_id": "down"}
        env = self.open(**kept)
        say(env, "echo mine >~/file")
        for call in (self.calls.snapshot, self.calls.end):
            cloud.fault(call, status=self.fatal, times=99)
        with pytest.warns(HermitcrabWarning, match="the task was not kept"):
            env.cleanup()
        assert f"the sandbox {env.sandbox_id} was not removed, and the next program" in caplog.text
        cloud.heal()
        with self.open(**kept) as env:
            assert say(env, "cat ~/file") == "mine"
        assert cloud.boxes() == []

    def test_what_another_program_kept_meanwhile_is_not_replaced(self, cloud: Cloud) -> None:
        if not self.calls.snapshot:
            pytest.skip("this provider has no snapshots")
        first, second = (self.open(persistent_filesystem=True) for _ in range(2))
        say(first, "echo first >~/file")
        first.cleanup()
        say(second, "echo second >~/file")
        with pytest.warns(HermitcrabWarning, match="another program kept this task meanwhile"):
            second.cleanup()
        with self.open(persistent_filesystem=True) as env:
            assert say(env, "cat ~/file") == "first"
            env._async._keeper = None

    def test_it_can_be_left_and_joined(self, cloud: Cloud) -> None:
        with self.open() as env:
            with pytest.raises(UnsupportedCapability, match="ends with its owner"):
                env.detach()
            works(env)
        env = self.open(task_id="joined")
        id = env.sandbox_id
        say(env, "echo mine >/tmp/mine")
        server = env.start("echo begun; cat; printf '\\377\\200'; exit 7")
        read_until(server, "begun")
        env.start("exit 3").wait(PATIENCE)
        env.detach()
        assert [(each.id, each.orphaned) for each in self.listed("joined")] == [(id, False)]
        assert self.reaped() == []
        assert cloud.box()["expires"] >= time.time() + LEAST - 30
        with self.open(task_id="joined") as env:
            assert env.sandbox_id == id
            assert say(env, "cat /tmp/mine") == "mine"
            (server,) = env.resumed()
            server.write(b"told later\n")
            server.close_stdin()
            assert b"".join(chunk.data for chunk in server.chunks()).endswith(b"told later\n\xff\x80")
            assert server.wait(PATIENCE).returncode == 7
        assert cloud.boxes() == []
        assert tasks.read(self.backend, "joined") is None
        with self.open(task_id="joined") as env:
            assert env.sandbox_id != id
            assert env.resumed() == []

    def test_the_later_program_takes_over(self, cloud: Cloud) -> None:
        first = self.open(task_id="shared")
        lost = first.start("sleep 600")
        second = self.open(task_id="shared")
        assert second.sandbox_id == first.sandbox_id
        with pytest.raises(SandboxLost, match="taken over"):
            lost.wait(PATIENCE)
        with pytest.raises(SandboxLost, match="another program has taken over"):
            first.execute("true")
        works(second)
        first.cleanup()  # it is not its own any more
        works(second)
        cloud.vanish(second.sandbox_id)
        soon(lambda: bool(second._session.sandbox.lost))
        with pytest.warns(HermitcrabWarning, match="made anew"):
            works(second)
        second.detach()
        third = self.open(task_id="shared")
        assert third.sandbox_id == second.sandbox_id
        third.cleanup()
        assert cloud.boxes() == []

    def test_a_broken_pipe_ends_what_ran(self, cloud: Cloud) -> None:
        with self.open(task_id="cut") as env:
            id = env.sandbox_id
            say(env, "v=kept")
            running = env.stream("echo once >>/tmp/ran; echo up; sleep 601")
            read_until(running, "up")
            self.break_pipe(cloud)
            with pytest.raises(SandboxLost) as caught:
                running.wait(PATIENCE)
            assert caught.value.partial_output == "up\n"
            assert say(env, "echo $v; cat /tmp/ran; pgrep -fx 'sleep 601' || echo none") == "kept\nonce\nnone"
            assert env.sandbox_id == id
            env.detach()
        with self.open(task_id="cut") as env:
            assert env.resumed() == []

    def test_what_another_environment_would_need_replaces_it(self, cloud: Cloud) -> None:
        env = self.open(task_id="changed")
        env.detach()
        with self.open(task_id="changed", persistent_filesystem=True) as other:
            assert [box["id"] for box in cloud.boxes()] == [other.sandbox_id]
            assert other.sandbox_id != env.sandbox_id
            other._async._keeper = None

    def test_a_named_session_goes_on(self, cloud: Cloud, capfd: pytest.CaptureFixture[str]) -> None:
        def crab(*words: str) -> str:
            capfd.readouterr()
            assert cli.main([*words]) == 0, capfd.readouterr()
            return capfd.readouterr().out

        sets = [word for key, value in self.options.items() for word in ("--set", f"{key}={value}")]
        crab("new", "work", "--on", self.backend, *sets)
        crab("exec", "work", "mkdir ~/made; cd ~/made; v=kept; echo mine >file")
        (box,) = cloud.boxes()
        assert crab("exec", "work", "cat file; echo $v; sleep 600 & echo $! >pid") == "mine\nkept\n"
        assert crab("exec", "work", "kill -0 $(cat pid) && echo runs") == "runs\n"
        assert [each["id"] for each in cloud.boxes()] == [box["id"]]
        # Its time is over: where it does not stay, a snapshot of it does.
        cloud.expire(box["id"])
        soon(lambda: all(each["state"] != "running" for each in cloud.boxes()))
        assert crab("exec", "work", "pwd; cat file; echo $v").endswith("/made\nmine\nkept\n")
        assert self.reaped() == []
        crab("rm", "work")
        assert cloud.boxes() == []
        assert snapshots.list_snapshots() == []
        assert sessions.every() == []

    def test_the_doctor_makes_one_and_removes_it(self, cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
        for key, value in self.options.items():
            monkeypatch.setenv(f"HERMITCRAB_{self.backend}_{key}".upper(), str(value))
        monkeypatch.setattr(probe, "_LISTED_FOR", (0.01,))
        done = doctor(self.backend)
        assert (done["code"], done["outcome"], cloud.boxes()) == (0, "passed", [])
        assert all(0 < seconds < PATIENCE for seconds in done["seconds"].values())
        self.positions(cloud, self.calls.create, self.calls.end)
        cloud.fault(self.calls.create, status=500, times=9, message="not today")
        done = doctor(self.backend)
        assert (done["code"], done["outcome"], done["seconds"]["start"]) == (1, "failed", None)
        assert "not today" in done["detail"]
        assert f"hermitcrab doctor --probe {self.backend}" in done["hint"]
        cloud.heal()
        cloud.fault(self.calls.end, status=500, times=99)
        done = doctor(self.backend)
        assert (done["code"], done["outcome"]) == (1, "failed")
        assert "still there after its removal" in done["detail"]
        assert "hermitcrab reap" in done["hint"]
        assert done["seconds"]["command"] is not None


def doctor(place: str) -> dict[str, Any]:
    """What `hermitcrab doctor --probe PLACE --json` says of it, and its exit code."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()):
        code = cli.main(["doctor", "--probe", place, "--json"])
    told: dict[str, Any] = json.loads(out.getvalue())["probes"][place]
    return {"code": code, **told}
