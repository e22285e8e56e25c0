"""How an agent is started, and how its lease ends it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Fd, Start, Tell
from tests.agent.harness import INPUT, OUTPUT, AgentClient, is_alive

Connect = Callable[..., AgentClient]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20)


class TestOptions:
    def test_version(self, c_agent: str) -> None:
        done = run(c_agent, "--version")
        assert (done.stdout, done.returncode) == ("hermitcrab-agent 1\n", 0)

    @pytest.mark.parametrize(
        "options",
        [
            ["--what"],
            ["what"],
            [""],
            ["--lease"],
            ["--lease", ""],
            ["--lease", "0"],
            ["--lease", "-1"],
            ["--lease", "1s"],
            ["--lease", "99999999999999999999"],
            ["--version", "--lease", "1"],
            ["--serve"],
            ["--connect"],
            ["--join"],
        ],
        ids=repr,
    )
    def test_what_makes_no_sense_is_refused(self, command: list[str], options: list[str]) -> None:
        done = run(*command, *options)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: ")
        assert done.stdout == ""

    @pytest.mark.parametrize(
        "options",
        [
            ["--serve", ""],
            ["--connect", ""],
            ["--serve", "/nonexistent/x", "--unlink"],
            ["--serve", "/nonexistent/x", "--text"],
            ["--connect", "/nonexistent/x", "--text"],
            ["--serve", "/nonexistent/x", "--lease", "0"],
            ["--connect", "/nonexistent/x", "--lease", "5"],
            ["--connect", "/nonexistent/x", "--serve", "/nonexistent/x"],
            ["--join", ""],
            ["--join", "/nonexistent/x", "--serve", "/nonexistent/x"],
            ["--join", "/nonexistent/x", "--connect", "/nonexistent/x"],
        ],
        ids=repr,
    )
    def test_what_does_not_go_together_is_refused(self, c_agent: str, options: list[str]) -> None:
        done = run(c_agent, *options)
        assert done.returncode == 2
        assert done.stderr.startswith("usage: ")

    @pytest.mark.parametrize(
        "options", [["--serve", "x"], ["--connect", "x"], ["--unlink"], ["--text"]], ids=repr
    )
    def test_what_the_fallback_cannot_do(self, options: list[str]) -> None:
        run_fallback = "from hermitcrab.agent import fallback; raise SystemExit(fallback.main())"
        assert run(sys.executable, "-c", run_fallback, *options).returncode == 2

    def test_a_program_that_came_through_the_pipe_leaves_nothing(self, c_agent: str, tmp_path: Path) -> None:
        copy = shutil.copy(c_agent, tmp_path / "agent")
        with AgentClient([str(copy), "--unlink", "--lease", "60"]) as agent:
            agent.greet()
            assert list(tmp_path.iterdir()) == []
            assert agent.run("echo fine")[1] == b"fine\n"

    def test_otherwise_it_stays(self, c_agent: str, tmp_path: Path) -> None:
        copy = shutil.copy(c_agent, tmp_path / "agent")
        with AgentClient([str(copy)]) as agent:
            agent.greet()
            assert list(tmp_path.iterdir()) == [tmp_path / "agent"]


class TestText:
    """For a pipe that carries nothing but text."""

    def test_every_byte_arrives(self, c_agent: str) -> None:
        count = 1200  # times 256: more than a pipe holds, so that the agent has to stop in the middle
        program = f"import sys; sys.stdout.buffer.write(bytes(range(256)) * {count})"
        start = Start(argv=[b"python3", b"-c", program.encode()], fds=[Fd(1, OUTPUT)], inherit_env=True)
        asked = wire.PREAMBLE + wire.frame(Ask.START, 1, payload=wire.start_payload(start))
        frames, lines, output, gone = wire.Decoder(skip_noise=True), wire.Lines(), b"", False
        with subprocess.Popen([c_agent, "--text"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as agent:
            assert agent.stdin is not None
            assert agent.stdout is not None
            agent.stdin.write(asked)
            agent.stdin.flush()
            while not gone:
                text = os.read(agent.stdout.fileno(), 4099)
                assert text.isascii()
                assert text.replace(b"\n", b"").decode().isprintable()
                for frame in frames.feed(lines.feed(text)):
                    gone = gone or frame.type == Tell.GONE
                    output += frame.payload if frame.type == Tell.DATA else b""
        assert output == bytes(range(256)) * count

    def test_lines_of_others_pass_and_none_is_endless(self) -> None:
        lines = wire.Lines()
        assert lines.feed(b"hello\n~aG") == b"hello\n"
        assert lines.feed(b"k=\n~no base64\n~\n") == b"hi~no base64\n"
        endless = b"~" + b"A" * (1 << 17)
        assert lines.feed(endless) == endless
        assert lines.feed(b"~aGk=\n") == b"hi"


class TestLease:
    def test_a_silent_client_ends_everything(self, connect: Connect) -> None:
        agent = connect("--lease", "1")
        agent.greet()
        exec_id = agent.shell("trap '' TERM; echo $$; while :; do sleep 1; done")
        said = agent.wait_output(exec_id, b"\n")[1]
        began = time.monotonic()
        assert agent.process.wait(10) == 0
        assert 0.5 < time.monotonic() - began < 5
        agent.pump_until(lambda: agent.closed)
        assert agent.error
        assert "the lease" in agent.error
        assert not is_alive(int(said))

    def test_a_client_that_does_not_even_greet(self, connect: Connect) -> None:
        assert connect("--lease", "1").process.wait(10) == 0

    def test_a_sign_of_life_keeps_it(self, connect: Connect) -> None:
        agent = connect("--lease", "1")
        agent.greet()
        exec_id = agent.start("cat", fds=[Fd(0, INPUT)])
        for _ in range(8):
            agent.send(wire.frame(Ask.PING))
            agent.pump_for(0.25)  # a silence is what is tested
        assert not agent.closed
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert agent.wait_gone(exec_id).ended.code == 0

    def test_what_came_while_it_was_frozen_counts(self, connect: Connect) -> None:
        agent = connect("--lease", "1")
        agent.greet()
        agent.process.send_signal(signal.SIGSTOP)
        time.sleep(1.5)  # longer than the lease
        agent.send(wire.frame(Ask.PING))
        agent.process.send_signal(signal.SIGCONT)
        assert agent.run("echo fine")[1] == b"fine\n"

    def test_ping_is_always_allowed(self, agent: AgentClient) -> None:
        agent.send(wire.frame(Ask.PING))
        assert agent.run("echo fine")[1] == b"fine\n"
