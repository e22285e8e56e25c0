"""A supervisor may serve one exec after another, and no exec can tell."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Fd
from tests.agent.harness import (
    CONTENT,
    INPUT,
    OUTPUT,
    PLAIN,
    AgentClient,
    Outcome,
    is_alive,
    kill_quietly,
    wait_dead,
)

WHO = "echo $PPID"


@pytest.fixture
def agent(c_agent: str) -> Iterator[AgentClient]:
    with AgentClient([c_agent]) as client:
        client.greet()
        yield client


def supervisors(agent: AgentClient) -> list[int]:
    children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")
    return [int(pid) for pid in children.read_text().split() if is_alive(int(pid))]


def run(agent: AgentClient, script: str, fds: Iterable[Fd] = PLAIN) -> Outcome:
    """Returns when whoever supervised it is ready for the next one, or gone."""
    outcome = agent.wait_gone(agent.shell(script, fds=fds))
    for pid in supervisors(agent):
        while is_alive(pid) and not is_waiting(pid):
            os.sched_yield()
    return outcome


def is_waiting(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
    except (FileNotFoundError, ProcessLookupError):
        return False


def spare(agent: AgentClient) -> int:
    """A supervisor that served already and will be the next one to serve."""
    first, second = run(agent, WHO)[1], run(agent, WHO)[1]
    assert first == second
    return int(second)


class TestUse:
    def test_those_at_once_have_their_own(self, agent: AgentClient) -> None:
        spare(agent)
        execs = [agent.shell(f"{WHO}; read x", fds=(Fd(0, INPUT), *PLAIN[1:])) for _ in range(5)]
        seen = {agent.wait_output(exec_id, b"\n")[1] for exec_id in execs}
        assert len(seen) == 5
        for exec_id in execs:
            agent.send(wire.frame(Ask.CLOSE, exec_id))
        for exec_id in execs:
            agent.wait_gone(exec_id)
        assert run(agent, "echo fine")[1] == b"fine\n"

    def test_it_keeps_nothing_open(self, agent: AgentClient) -> None:
        served = Path(f"/proc/{spare(agent)}/fd")
        socket, null = sorted(os.readlink(fd) for fd in served.iterdir())[::-1]
        assert (socket[:7], null) == ("socket:", "/dev/null")
        assert run(agent, "ls /proc/self/fd")[1].split() == [b"0", b"1", b"2", b"3"]  # 3 is what it lists

    def test_a_failure_is_not_remembered(self, agent: AgentClient) -> None:
        spare(agent)
        missing = agent.wait_gone(agent.start("true", cwd=b"/nonexistent"))
        assert (missing.ended.cause, missing.ended.code) == (Cause.NOT_STARTED, 126)
        assert b"/nonexistent" in missing.ended.reason.encode()
        outcome = agent.wait_gone(agent.start("bash", "-c", "exit 127"))
        assert (outcome.ended.cause, outcome.ended.code, outcome.ended.reason) == (Cause.ENDED, 127, "")

    def test_what_does_not_fit_gets_a_new_one(self, agent: AgentClient) -> None:
        served = spare(agent)
        many = (*PLAIN, *(Fd(number, OUTPUT) for number in range(10, 110)))
        outcome = run(agent, f"{WHO}; echo high >&109", many)
        assert (int(outcome[1]) != served, outcome[109]) == (True, b"high\n")
        content = os.urandom(100_000)
        large = (Fd(0, CONTENT, content), *PLAIN[1:])
        outcome = run(agent, f"{WHO} >&3; cat", (*large, Fd(3, OUTPUT)))
        assert (int(outcome[3]) != served, outcome[1]) == (True, content)

    def test_a_terminal(self, agent: AgentClient) -> None:
        served = spare(agent)
        fds = (Fd.terminal(0, 24, 80), Fd.same_as(1, 0), Fd.same_as(2, 0))
        for _ in range(2):
            shown = run(agent, f"tty </dev/tty; {WHO}", fds)[0].split()
            assert shown == [b"/dev/tty", b"%d" % served]


class TestPoison:
    @pytest.mark.parametrize(
        "script",
        [
            "prlimit --pid $PPID --nofile=64:64 && ulimit -n",
            "renice -n 5 -p $PPID >/dev/null && nice",
            "echo 500 >/proc/$PPID/oom_score_adj && cat /proc/self/oom_score_adj",
        ],
    )
    def test_a_changed_supervisor_serves_no_more(self, agent: AgentClient, script: str) -> None:
        change, _, look = script.partition(" && ")
        before = run(agent, look)[1]
        served = spare(agent)
        assert run(agent, f"{WHO}; {change}; echo $?")[1] == b"%d\n0\n" % served
        for _ in range(3):
            assert run(agent, look)[1] == before
        wait_dead([served])

    def test_a_late_kill_hits_nobody_else(self, agent: AgentClient) -> None:
        for number in range(100):
            over = agent.shell("exit 3")
            late = wire.kill_frame(over, 0) if number % 2 else wire.signal_frame(over, signal.SIGTERM)
            agent.wait_exit(over)
            agent.send(late)
            outcome = agent.run("echo alive")
            assert (outcome[1], outcome.ended.code, outcome.ended.cause) == (b"alive\n", 0, Cause.ENDED)

    def test_one_that_killed_serves_no_more(self, agent: AgentClient) -> None:
        spare(agent)
        exec_id = agent.shell(f"{WHO}; sleep 100")
        killer = int(agent.wait_output(exec_id, b"\n")[1])
        agent.send(wire.kill_frame(exec_id, 0))
        agent.wait_gone(exec_id)
        wait_dead([killer])
        assert run(agent, "echo fine")[1] == b"fine\n"

    def test_a_kill_reaches_all_that_hides_below_it(self, agent: AgentClient) -> None:
        served = spare(agent)
        script = f"(setsid sleep 100 & echo $!); env -i sleep 100 & echo $! $$; {WHO} >&2; wait"
        exec_id = agent.shell(script, fds=(*PLAIN[:2], Fd(2, OUTPUT)))
        agent.pump_until(
            lambda: len(agent.execs[exec_id][1].split()) == 3 and b"\n" in agent.execs[exec_id][2]
        )
        agent.send(wire.kill_frame(exec_id, 50))
        outcome = agent.wait_gone(exec_id)
        assert int(outcome[2]) == served
        assert outcome.ended.cause is Cause.KILLED
        assert not any(is_alive(int(pid)) for pid in outcome[1].split())


class TestEnd:
    def test_killed(self, agent: AgentClient) -> None:
        served = spare(agent)
        kill_quietly(served)
        wait_dead([served])
        assert run(agent, "echo fine")[1] == b"fine\n"

    def test_stopped(self, agent: AgentClient) -> None:
        for _ in range(3):
            os.kill(spare(agent), signal.SIGSTOP)
            assert run(agent, "echo fine")[1] == b"fine\n"

    def test_without_work(self, agent: AgentClient) -> None:
        served = spare(agent)
        wait_dead(supervisors(agent))
        assert int(run(agent, WHO)[1]) != served

    def test_with_the_agent(self, agent: AgentClient) -> None:
        served = [spare(agent), *supervisors(agent)]
        agent.process.kill()
        wait_dead(served)
