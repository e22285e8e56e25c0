"""What every provider owes of what is kept: files, tasks that go on, sandboxes that are left and joined."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hermitcrab import cli, sessions, snapshots
from hermitcrab.backends.clouds import tasks
from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.errors import HermitcrabWarning, UnsupportedCapability
from hermitcrab.testing.inside import PATIENCE, read_until, say, soon, works
from tests.clouds.provided import KEPT, Provided, lost, positions
from tests.clouds.running import Cloud


class Keeping(Provided):
    def test_a_task_goes_on(self, cloud: Cloud) -> None:
        with self.open(**KEPT) as env:
            say(env, "echo mine >~/file; v=kept")
        assert (cloud.boxes(), len(cloud.snapshots())) == ([], 1)
        with self.open(**KEPT) as env:
            assert say(env, "cat ~/file; echo $v") == "mine\nkept"
            say(env, "echo more >>~/file")
            cloud.vanish(env.sandbox_id)
            lost(env)
            with pytest.warns(HermitcrabWarning, match="made anew"):
                assert say(env, "cat ~/file; echo $v") == "mine\nkept"
        assert len(cloud.snapshots()) == 1  # the one before it was replaced

    def test_a_snapshot_that_expired(self, cloud: Cloud) -> None:
        with self.open(**KEPT) as env:
            say(env, "echo mine >~/file")
        for snapshot in cloud.snapshots():
            cloud.expire_snapshot(snapshot)
        with pytest.warns(HermitcrabWarning, match="begins anew"):
            env = self.open(**KEPT)
        assert say(env, "ls ~") == ""
        env.cleanup()

    def test_it_ends_even_when_it_cannot_be_kept(self, cloud: Cloud) -> None:
        env = self.open(**KEPT)
        cloud.fault(self.calls.snapshot, status=self.fatal, times=9)
        with pytest.warns(HermitcrabWarning, match="the task was not kept"):
            env.cleanup()
        assert cloud.boxes() == []

    def test_files_come_back_then_it_is_kept_then_it_ends(self, cloud: Cloud, tmp_path: Path) -> None:
        project = tmp_path / "project"
        project.mkdir()
        (project / "file").write_text("from here")
        options = {"sync": [f"{project}:~/project:back"], "persistent_filesystem": True, "task_id": "order"}
        env = self.open(**options)
        say(env, "cd ~/project && cat file && echo from there >file")
        cloud.calls(forget=True)
        env.cleanup()
        assert (project / "file").read_text() == "from there\n"
        kept, ended = positions(cloud, self.calls.snapshot, self.calls.end)
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
        with self.open(task_id="joined") as env:
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

        crab("new", "work", "--on", self.backend)
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
