"""What every provider owes when a connection, a sandbox or a program of ours is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

import hermitcrab
from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.errors import HermitcrabWarning, SandboxLost
from hermitcrab.testing.inside import PATIENCE, meanwhile, read_until, say, soon, works
from tests.clouds.provided import Provided, lost, ran
from tests.clouds.running import Cloud

ODD_TASK = "a crash/" + "é" * 40
CRASHING = """
import sys, hermitcrab
env = hermitcrab.open(sys.argv[1], task_id=sys.argv[2])
print(env.sandbox_id, flush=True)
sys.stdin.read()
"""


class Losing(Provided):
    def test_a_broken_pipe_ends_what_ran(self, cloud: Cloud) -> None:
        env = self.open(task_id="cut")
        say(env, "v=kept; cd /usr; f() { echo $v; }")
        running = env.stream("echo once >>/tmp/ran; echo up; sleep 601; echo after")
        read_until(running, "up")
        self.break_pipe(cloud)
        with pytest.raises(SandboxLost, match="the connection to it broke") as caught:
            running.wait(PATIENCE)
        assert caught.value.partial_output == "up\n"
        told = say(env, "f; pwd; cat /tmp/ran; pgrep -fx 'sleep 601' || echo none")
        assert told == "kept\n/usr\nonce\nnone"
        none_left(env, cloud)
        env.detach()
        with self.open(task_id="cut") as joined:
            assert joined.sandbox_id == env.sandbox_id
            assert joined.resumed() == []
        assert self.made(cloud) == 1

    def test_a_sandbox_that_vanished(self, cloud: Cloud) -> None:
        anew = f"is gone at {self.title}; the session goes on in .*, made anew"
        with self.open() as env:
            say(env, "v=kept; cd /usr; touch /tmp/mine")
            cloud.vanish(env.sandbox_id)
            lost(env)
            with pytest.warns(HermitcrabWarning, match=anew):
                assert say(env, "echo $v; pwd; ls /tmp") == "kept\n/usr"
            assert env.sandbox_id == cloud.box()["id"]
            assert self.made(cloud) == 2
            with meanwhile(env, "touch /tmp/up; sleep 600") as future:
                soon(lambda: env.execute("test -e /tmp/up").returncode == 0)
                cloud.vanish(env.sandbox_id)
                error = future.exception(PATIENCE)
            assert isinstance(error, SandboxLost)
            assert self.gone in str(error)
            with pytest.warns(HermitcrabWarning, match=anew):
                assert say(env, "echo $v; pwd; ls /tmp") == "kept\n/usr"
            assert env.sandbox_id == cloud.box()["id"]
            assert self.made(cloud) == 3

    def test_a_sandbox_that_cannot_be_ended_ends_by_itself(
        self, cloud: Cloud, caplog: pytest.LogCaptureFixture
    ) -> None:
        env = self.open()
        cloud.fault(self.calls.end, status=500, times=9)
        env.cleanup()
        assert f"the sandbox {env.sandbox_id} was not removed, and ends by itself in 300 s" in caplog.text
        # Nothing of ours runs in it any more.
        soon(lambda: cloud.box()["programs"] == 0)
        assert cloud.box()["expires"] <= time.time() + LEAST + 1

    def test_nothing_outlives_a_killed_program_for_long(self, cloud: Cloud) -> None:
        command = [sys.executable, "-c", CRASHING, self.backend, ODD_TASK]
        program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert program.stdout is not None
        id = program.stdout.readline().strip()
        with self.open() as one, self.open() as two:  # more than some list at once
            (of_program,) = self.listed(ODD_TASK)
            assert (of_program.id, of_program.orphaned) == (id, False)
            assert (of_program.owner, of_program.detail) == (f"pid {program.pid}", self.made_from)
            program.send_signal(signal.SIGKILL)
            program.communicate()
            cloud.fault(self.calls.end, status=403)
            assert self.reaped() == []  # the next one removes it
            assert [(each.id, each.orphaned) for each in self.reaped()] == [(id, True)]
            assert {box["id"] for box in cloud.boxes()} == {one.sandbox_id, two.sandbox_id}

    def test_the_later_program_takes_over(self, cloud: Cloud) -> None:
        first = self.open(task_id="shared")
        stream = first.start("sleep 600")
        second = self.open(task_id="shared")
        assert second.sandbox_id == first.sandbox_id
        with pytest.raises(SandboxLost, match="taken over"):
            stream.wait(PATIENCE)
        with pytest.raises(SandboxLost, match="another program has taken over"):
            first.execute("true")
        works(second)
        first.cleanup()  # it is not its own any more
        works(second)
        cloud.vanish(second.sandbox_id)
        lost(second)
        with pytest.warns(HermitcrabWarning, match="made anew"):
            works(second)
        second.detach()
        third = self.open(task_id="shared")
        assert third.sandbox_id == second.sandbox_id
        third.cleanup()
        assert cloud.boxes() == []


class LosingInput(Provided):
    """Of those where input is a call, which might do twice what it does."""

    input: str

    def test_input_of_unknown_fate_is_not_sent_again(self, cloud: Cloud) -> None:
        with self.open() as env:
            say(env, "v=kept; touch /tmp/ran")
            cloud.fault(self.input, status=500, afterwards=True)
            with pytest.raises(SandboxLost):
                env.execute("echo once >>/tmp/ran; sleep 600", timeout=PATIENCE)
            assert say(env, "echo $v") == "kept"
            assert ran(env, "once") <= 1
            cloud.fault(self.input, status=500)
            with pytest.raises(SandboxLost):
                env.execute("echo never >>/tmp/ran", timeout=PATIENCE)
            assert ran(env, "never") == 0
            none_left(env, cloud)


def none_left(env: hermitcrab.Environment, cloud: Cloud) -> None:
    """Of lost agents; one `sleep` is the sandbox's own."""
    soon(lambda: say(env, "pgrep -c sleep") == "1" and cloud.box()["programs"] == 1)
