"""Programs at a terminal: what is typed, what is shown, its size and its end."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator

import pytest

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Fd, Feature, Tell
from tests.agent.harness import OUTPUT, AgentClient, Outcome, is_alive

TERMINAL = (Fd.terminal(0, 24, 80), Fd.same_as(1, 0), Fd.same_as(2, 0))


def type_in(agent: AgentClient, exec_id: int, text: bytes, channel: int = 0) -> None:
    agent.send(wire.frame(Ask.DATA, exec_id, channel, text))


def close(agent: AgentClient, exec_id: int) -> None:
    agent.send(wire.frame(Ask.CLOSE, exec_id, 0))


def test_it_is_announced(agent: AgentClient) -> None:
    assert agent.hello is not None
    assert agent.hello.features & Feature.TERMINALS


class TestWhatAProgramGets:
    def test_a_controlling_terminal(self, agent: AgentClient) -> None:
        outcome = agent.run("test -t 0 && test -t 1 && test -t 2 && echo here > /dev/tty", fds=TERMINAL)
        assert (outcome[0], outcome.ended.code) == (b"here\r\n", 0)

    def test_its_size(self, agent: AgentClient) -> None:
        fds = (Fd.terminal(0, 50, 132), *TERMINAL[1:])
        assert agent.run("stty size", fds=fds)[0] == b"50 132\r\n"

    def test_the_usual_settings(self, agent: AgentClient) -> None:
        settings = agent.run("stty -a", fds=TERMINAL)[0].split()
        assert {b"echo", b"icanon", b"isig", b"opost", b"onlcr", b"iutf8"} <= set(settings)

    def test_at_any_number_and_beside_others(self, agent: AgentClient) -> None:
        fds = [Fd.terminal(7, 10, 20), Fd(1, OUTPUT)]
        outcome = agent.run("stty size <&7; echo shown >&7; tty > /dev/null || echo none", fds=fds)
        assert (outcome[7], outcome[1]) == (b"shown\r\n", b"10 20\nnone\n")

    def test_nothing_else_is_open(self, agent: AgentClient) -> None:
        outcome = agent.wait_exit(agent.start("ls", "/proc/self/fd", fds=TERMINAL))
        assert outcome[0].split() == [b"0", b"1", b"2", b"3"]


class TestTyping:
    def test_what_is_typed_is_echoed_and_read(self, agent: AgentClient) -> None:
        exec_id = agent.shell("echo ready; read -r line; echo got $line", fds=TERMINAL)
        agent.wait_output(exec_id, b"ready", 0)
        type_in(agent, exec_id, b"some text\r")
        assert agent.wait_exit(exec_id)[0] == b"ready\r\nsome text\r\ngot some text\r\n"

    def test_interrupt(self, agent: AgentClient) -> None:
        exec_id = agent.shell("trap 'echo caught; exit 5' INT; echo ready; read", fds=TERMINAL)
        agent.wait_output(exec_id, b"ready", 0)
        type_in(agent, exec_id, b"\3")
        outcome = agent.wait_exit(exec_id)
        assert b"caught" in outcome[0]
        assert (outcome.ended.cause, outcome.ended.code) == (Cause.ENDED, 5)

    def test_a_shell_with_job_control(self, agent: AgentClient) -> None:
        exec_id = agent.start("bash", "--norc", "-i", fds=TERMINAL)
        type_in(agent, exec_id, b"PS1='<>'; sleep 100\r")
        agent.wait_output(exec_id, b"sleep 100", 0)
        agent.pump_until(lambda: b"sleep" in foreground(agent))
        type_in(agent, exec_id, b"\32")
        agent.wait_output(exec_id, b"Stopped", 0)
        type_in(agent, exec_id, b"fg\r")
        agent.pump_until(lambda: b"sleep" in foreground(agent))
        type_in(agent, exec_id, b"\3")
        agent.wait_output(exec_id, b"^C", 0)
        type_in(agent, exec_id, b"echo do''ne; exit 4\r")
        outcome = agent.wait_gone(exec_id)
        assert b"done" in outcome[0]
        assert outcome.ended.code == 4

    def test_every_byte_without_processing(self, agent: AgentClient) -> None:
        exec_id = agent.shell("stty raw -echo; echo ready; head -c 256 | od -An -v -tu1", fds=TERMINAL)
        agent.wait_output(exec_id, b"ready", 0)
        type_in(agent, exec_id, bytes(range(256)))
        shown = agent.wait_exit(exec_id)[0].removeprefix(b"ready\n")
        assert [int(word) for word in shown.split()] == list(range(256))

    def test_more_than_the_terminal_takes_at_once(self, agent: AgentClient) -> None:
        script = "stty raw -echo; echo ready; sleep 0.1; head -c 200000 | tr -d x | wc -c; head -c 3"
        exec_id = agent.shell(script, fds=TERMINAL)
        agent.wait_output(exec_id, b"ready", 0)
        type_in(agent, exec_id, b"x" * 200_000 + b"end")
        assert agent.wait_exit(exec_id)[0] == b"ready\n0\nend"


def foreground(agent: AgentClient) -> bytes:
    """The programs in the foreground of some terminal."""
    return agent.run("ps -A -o stat=,comm= | grep '^S.*+'")[1]


class TestClose:
    @pytest.mark.parametrize("text", [b"", b"line\n", b"half a line", b"one\ntwo"])
    def test_is_an_end_of_file(self, agent: AgentClient, text: bytes) -> None:
        exec_id = agent.shell("stty -echo; echo ready; cat; echo over", fds=TERMINAL)
        agent.wait_output(exec_id, b"ready\r\n", 0)
        type_in(agent, exec_id, text)
        close(agent, exec_id)
        shown = agent.wait_exit(exec_id)[0]
        assert shown == b"ready\r\n" + text.replace(b"\n", b"\r\n") + b"over\r\n"

    def test_the_terminal_goes_on_showing(self, agent: AgentClient) -> None:
        exec_id = agent.shell("cat; stty size; echo later", fds=TERMINAL)
        close(agent, exec_id)
        assert agent.wait_exit(exec_id)[0].endswith(b"24 80\r\nlater\r\n")

    def test_is_heard_once(self, agent: AgentClient) -> None:
        exec_id = agent.shell("stty -echo; echo ready; cat; read -t 0.2; echo $?", fds=TERMINAL)
        agent.wait_output(exec_id, b"ready\r\n", 0)
        close(agent, exec_id)
        close(agent, exec_id)
        assert agent.wait_exit(exec_id)[0].endswith(b"\r\n142\r\n")

    def test_data_after_it_is_malformed(self, agent: AgentClient) -> None:
        exec_id = agent.start("sleep", "100", fds=TERMINAL)
        close(agent, exec_id)
        type_in(agent, exec_id, b"x")
        agent.pump_to_end()
        assert agent.error


class TestResize:
    def test_the_program_is_told(self, agent: AgentClient) -> None:
        script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.02; done"
        exec_id = agent.shell(script, fds=TERMINAL)
        agent.wait_output(exec_id, b"ready", 0)
        agent.send(wire.resize_frame(exec_id, 0, 40, 100))
        assert agent.wait_exit(exec_id)[0] == b"ready\r\n40 100\r\n"

    def test_late_ones_are_ignored(self, agent: AgentClient) -> None:
        exec_id = agent.shell("trap '' HUP; sleep 100 & exit", fds=TERMINAL)
        agent.wait_exit(exec_id)
        agent.send(wire.resize_frame(exec_id, 0, 40, 100), wire.kill_frame(exec_id, 0))
        agent.wait_gone(exec_id)
        agent.send(wire.resize_frame(exec_id, 0, 40, 100))
        assert agent.run("echo fine")[1] == b"fine\n"


class TestShowing:
    def test_all_of_it_comes_before_exit(self, agent: AgentClient) -> None:
        outcome = agent.run("seq 50000; exit 3", fds=TERMINAL)
        assert outcome[0] == b"".join(b"%d\r\n" % i for i in range(1, 50001))
        assert outcome.ended.code == 3

    def test_a_slow_client_loses_nothing(self, agent: AgentClient) -> None:
        agent.auto_credit = False
        exec_id = agent.shell(f"stty -onlcr; head -c {wire.OUTPUT_CREDIT + 3000} /dev/zero", fds=TERMINAL)
        outcome = agent.execs[exec_id]
        agent.pump_until(lambda: len(outcome[0]) == wire.OUTPUT_CREDIT)
        agent.pump_for(0.1)
        assert (len(outcome[0]), outcome.exit) == (wire.OUTPUT_CREDIT, None)
        agent.send(wire.credit(Ask.CREDIT, exec_id, 0, wire.OUTPUT_CREDIT))
        assert agent.wait_gone(exec_id)[0] == bytes(wire.OUTPUT_CREDIT + 3000)

    def test_what_runs_on_does_not_delay_exit(self, agent: AgentClient) -> None:
        exec_id = agent.shell("trap '' HUP; (while echo y; do :; done) & sleep 0.05; exit 5", fds=TERMINAL)
        assert agent.wait_exit(exec_id).ended.code == 5
        agent.send(wire.kill_frame(exec_id, 0))
        agent.wait_gone(exec_id)

    def test_the_end_of_the_session_hangs_up(self, agent: AgentClient) -> None:
        exec_id = agent.shell("set -m; sleep 100 & echo $!; fg", fds=TERMINAL)
        shown = agent.wait_output(exec_id, b"sleep", 0)[0]
        os.kill(int(shown.split()[0]), 0)
        agent.send(wire.signal_frame(exec_id, signal.SIGHUP))
        agent.wait_gone(exec_id)
        assert not is_alive(int(shown.split()[0]))

    def test_a_program_that_leaves_its_terminal(self, agent: AgentClient) -> None:
        exec_id = agent.shell("exec <&- >&- 2>&-; exec sleep 100", fds=TERMINAL)
        outcome = agent.execs[exec_id]
        agent.pump_until(lambda: any(f.type == Tell.CLOSE for f in outcome.frames))
        type_in(agent, exec_id, b"nobody reads this")
        agent.send(wire.resize_frame(exec_id, 0, 1, 1), wire.kill_frame(exec_id, 0))
        outcome = agent.wait_gone(exec_id)
        assert outcome.ended.cause is Cause.KILLED
        told = [f.type for f in outcome.frames if f.type not in (Tell.DATA, Tell.CREDIT)]
        assert told == [Tell.CLOSE, Tell.EXIT, Tell.GONE]

    def test_kill(self, agent: AgentClient) -> None:
        exec_id = agent.shell("trap '' TERM HUP; echo $$; while :; do sleep 1; done", fds=TERMINAL)
        shown = agent.wait_output(exec_id, b"\n", 0)[0]
        agent.send(wire.kill_frame(exec_id, 20))
        assert agent.wait_gone(exec_id).ended.cause is Cause.KILLED
        assert not is_alive(int(shown))


NEW_DEV = "mount -t tmpfs tmpfs /dev && mknod -m 666 /dev/null c 1 3 && "
OWN_PTS = "mkdir /dev/pts && mount -t devpts -o newinstance,ptmxmode=0666 devpts /dev/pts && "


@pytest.fixture
def with_dev(command: list[str]) -> Iterator[Callable[[str], AgentClient]]:
    """Starts an agent that has another /dev."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("only root may mount")
    clients: list[AgentClient] = []

    def start(preparation: str) -> AgentClient:
        client = AgentClient(
            ["unshare", "--mount", "bash", "-c", preparation + 'exec "$@"', "bash", *command]
        )
        clients.append(client)
        client.greet()
        return client

    yield start
    for client in clients:
        client.__exit__()


def size_of_terminal(agent: AgentClient) -> Outcome:
    return agent.wait_gone(agent.shell("stty size", fds=TERMINAL))


def test_without_a_ptmx_in_dev(with_dev: Callable[[str], AgentClient]) -> None:
    assert size_of_terminal(with_dev(NEW_DEV + OWN_PTS))[0] == b"24 80\r\n"


def test_without_any(with_dev: Callable[[str], AgentClient]) -> None:
    agent = with_dev(NEW_DEV)
    ended = size_of_terminal(agent).ended
    assert (ended.cause, ended.code) == (Cause.NOT_STARTED, 126)
    assert ended.reason == "cannot open a terminal: No such file or directory"
    assert agent.run("echo fine")[1] == b"fine\n"
