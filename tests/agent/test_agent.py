"""Does an agent do what PROTOCOL.md says? On each implementation, over a socket and over pipes."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hermitcrab.agent import wire
from hermitcrab.agent.wire import Ask, Cause, Fd, FdKind, Start, Tell
from tests.agent.harness import (
    CONTENT,
    ENV,
    INPUT,
    NULL,
    OUTPUT,
    PLAIN,
    AgentClient,
    Outcome,
    is_alive,
    kill_quietly,
    wait_dead,
)

Connect = Callable[..., AgentClient]
WITH_INPUT = (Fd(0, INPUT), Fd(1, OUTPUT), Fd.same_as(2, 1))


def pids(text: bytes) -> list[int]:
    return [int(word) for word in text.split()]


class TestStart:
    def test_hello(self, agent: AgentClient) -> None:
        assert agent.hello is not None
        assert agent.hello.pid == agent.process.pid
        assert agent.hello.machine == os.uname().machine
        assert agent.hello.features & wire.Feature.SUBREAPER
        assert agent.hello.features & wire.Feature.SEES_ALL_DESCENDANTS

    @pytest.mark.parametrize("code", [0, 1, 42, 255])
    def test_exit_code(self, agent: AgentClient, code: int) -> None:
        outcome = agent.wait_gone(agent.shell(f"exit {code}"))
        assert outcome.ended.cause is Cause.ENDED
        assert outcome.ended.code == code
        assert not outcome.ended.survivors
        assert outcome.ended.reason == ""

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV, signal.SIGPIPE])
    def test_death_by_signal(self, agent: AgentClient, number: int) -> None:
        outcome = agent.run(f"ulimit -c 0; kill -{int(number)} $$")
        assert outcome.ended.cause is Cause.ENDED
        assert outcome.ended.code == -number

    @pytest.mark.parametrize("program", ["/nonexistent/program", "no-such-program-anywhere"])
    def test_missing_program(self, agent: AgentClient, program: str) -> None:
        outcome = agent.wait_gone(agent.start(program))
        assert outcome.ended.cause is Cause.NOT_STARTED
        assert outcome.ended.code == 127
        assert program in outcome.ended.reason

    def test_not_executable(self, agent: AgentClient, tmp_path: Path) -> None:
        plain = tmp_path / "plain"
        plain.write_text("echo no")
        for program in (str(plain), str(tmp_path), "/etc/passwd/x"):
            outcome = agent.wait_gone(agent.start(program))
            assert outcome.ended.cause is Cause.NOT_STARTED
            assert outcome.ended.code == 126
            assert outcome.ended.reason

    def test_found_in_path_but_not_executable(self, agent: AgentClient, tmp_path: Path) -> None:
        (tmp_path / "tool").write_text("echo no")
        outcome = agent.wait_gone(agent.start("tool", env=[b"PATH=" + bytes(tmp_path)]))
        assert outcome.ended.code == 126

    def test_cwd(self, agent: AgentClient, tmp_path: Path) -> None:
        odd = bytes(tmp_path) + b"/a b\xff\n"
        os.mkdir(odd)
        outcome = agent.wait_exit(agent.start("pwd", "-P", cwd=odd))
        assert outcome[1] == odd + b"\n"

    def test_cwd_missing(self, agent: AgentClient) -> None:
        outcome = agent.wait_gone(agent.start("pwd", cwd=b"/nonexistent/place"))
        assert outcome.ended.cause is Cause.NOT_STARTED
        assert outcome.ended.code == 126
        assert "/nonexistent/place" in outcome.ended.reason

    def test_argv_is_exact(self, agent: AgentClient) -> None:
        arguments = [b"a b", b"", b"\xff\xfe", b"*", b"-n", b"x" * 100_000, b"\n"]
        script = 'printf \'%s\\0\' "$0" "$@"'
        outcome = agent.wait_exit(agent.start("bash", "-c", script, "zero", *arguments))
        assert outcome[1].split(b"\0")[:-1] == [b"zero", *arguments]

    def test_program_differs_from_argv0(self, agent: AgentClient) -> None:
        outcome = agent.wait_exit(agent.start("-name", "-c", "echo $0", program=b"bash"))
        assert outcome[1] == b"-name\n"

    def test_env_is_exact(self, agent: AgentClient) -> None:
        env = [b"B=2", b"A=1", b"EMPTY=", b"ODD=\xff a\nb=c", b"PATH=/bin:/usr/bin"]
        outcome = agent.wait_exit(agent.start("cat", "/proc/self/environ", env=env))
        assert outcome[1].split(b"\0")[:-1] == env

    def test_no_env(self, agent: AgentClient) -> None:
        outcome = agent.wait_exit(agent.start("cat", "/proc/self/environ", env=[]))
        assert outcome.ended.code == 0
        assert outcome[1] == b""

    def test_inherited_env(self, connect: Connect) -> None:
        agent = connect(env={"PATH": os.environ["PATH"], "KEPT": "from agent", "CHANGED": "from agent"})
        agent.greet()
        exec_id = agent.start("cat", "/proc/self/environ", env=[b"CHANGED=new", b"MORE=1"], inherit_env=True)
        entries = agent.wait_exit(exec_id)[1].split(b"\0")
        assert b"KEPT=from agent" in entries
        assert [e for e in entries if e.startswith(b"CHANGED=")] == [b"CHANGED=new"]
        assert b"MORE=1" in entries

    def test_path_of_the_env_fields_is_searched(self, agent: AgentClient, tmp_path: Path) -> None:
        tool = tmp_path / "only-here"
        tool.write_text("#!/bin/sh\necho found\n")
        tool.chmod(0o755)
        path = b"PATH=/nonexistent:" + bytes(tmp_path) + b":/usr/bin:/bin"
        assert agent.wait_exit(agent.start("only-here", env=[path]))[1] == b"found\n"
        assert agent.wait_exit(agent.start("only-here")).ended.code == 127

    def test_new_session_and_clean_signals(self, agent: AgentClient) -> None:
        # Not from a shell: it blocks and ignores signals of its own.
        outcome = agent.wait_exit(
            agent.start("grep", "-E", "^(Sig(Blk|Ign)|NSsid|NSpid)", "/proc/self/status")
        )
        status = dict(line.split(":\t") for line in outcome[1].decode().splitlines())
        # The C library keeps 32 and 33 for itself; whoever started us may have them ignored, for good.
        ignored = int(status["SigIgn"], 16) & ~(1 << 31 | 1 << 32)
        assert int(status["SigBlk"], 16) == ignored == 0
        assert status["NSsid"] == status["NSpid"]

    def test_limits_are_those_of_the_agent(self, agent: AgentClient) -> None:
        here = subprocess.run(["bash", "-c", "ulimit -Sn; ulimit -Hn"], stdout=subprocess.PIPE, check=True)
        assert agent.run("ulimit -Sn; ulimit -Hn")[1] == here.stdout

    def test_ids_can_be_used_again(self, agent: AgentClient) -> None:
        exec_id = agent.start("true")
        agent.wait_gone(exec_id)
        agent.execs[exec_id] = Outcome()
        agent.send(wire.start_frame(exec_id, Start([b"echo", b"again"], PLAIN, ENV)))
        assert agent.wait_gone(exec_id)[1] == b"again\n"

    def test_usage(self, agent: AgentClient) -> None:
        ended = agent.run("i=0; while ((i < 60000)); do ((i++)); done; sleep 0.05").ended
        assert 0.005 < ended.user_seconds + ended.system_seconds < ended.wall_seconds
        assert 0.05 <= ended.wall_seconds < 10
        assert 1000 < ended.peak_memory_kib < 100_000


class TestDescriptors:
    def test_nothing_else_is_open(self, agent: AgentClient) -> None:
        agent.start("sleep", "100", fds=WITH_INPUT)  # its pipes are none of the other's business
        outcome = agent.wait_exit(agent.start("ls", "/proc/self/fd", fds=[Fd(1, OUTPUT)]))
        assert pids(outcome[1]) == [0, 1, 2, 3]  # 3 is the directory itself

    def test_unlisted_standard_descriptors_are_null(self, agent: AgentClient) -> None:
        outcome = agent.run("readlink /proc/$$/fd/0 /proc/$$/fd/1 /proc/$$/fd/2 >&9", fds=[Fd(9, OUTPUT)])
        assert outcome[9] == b"/dev/null\n" * 3

    def test_null(self, agent: AgentClient) -> None:
        outcome = agent.run("wc -c; echo x >&7; echo $?", fds=[Fd(0, NULL), Fd(1, OUTPUT), Fd(7, NULL)])
        assert outcome[1] == b"0\n0\n"

    @pytest.mark.parametrize("size", [0, 1, 100_000, 900_000])
    def test_content_is_seekable(self, agent: AgentClient, size: int) -> None:
        content = os.urandom(size)
        script = "import os; r = os.read; a = r(5, 1 << 20); os.lseek(5, 0, 0); assert r(5, 1 << 20) == a; "
        script += "print(a.hex(), end='')"
        fds = [Fd(0, NULL), Fd(1, OUTPUT), Fd(5, CONTENT, content)]
        outcome = agent.wait_exit(agent.start("python3", "-c", script, fds=fds))
        assert outcome.ended.code == 0
        assert outcome[1].decode() == content.hex()

    def test_content_as_a_script(self, agent: AgentClient) -> None:
        fds = [Fd(0, CONTENT, b"echo one\necho two $1\n"), Fd(1, OUTPUT)]
        assert agent.wait_exit(agent.start("bash", "-s", "arg", fds=fds))[1] == b"one\ntwo arg\n"

    def test_same_keeps_the_order(self, agent: AgentClient) -> None:
        outcome = agent.run("for i in {1..500}; do echo out$i; echo err$i >&2; done")
        assert outcome[1].split() == [b"%s%d" % (kind, i) for i in range(1, 501) for kind in (b"out", b"err")]

    def test_apart(self, agent: AgentClient) -> None:
        outcome = agent.run("echo out; echo err >&2", fds=[Fd(1, OUTPUT), Fd(2, OUTPUT)])
        assert (outcome[1], outcome[2]) == (b"out\n", b"err\n")

    @pytest.mark.parametrize("size", [0, 7, 3 << 20])
    def test_a_file_is_sent_at_the_end(self, agent: AgentClient, size: int) -> None:
        fds = [*PLAIN, Fd(247, FdKind.FILE)]
        outcome = agent.run(f"head -c {size} /dev/zero >&247; printf end >&247; echo out; exit 7", fds=fds)
        assert outcome[247] == b"\0" * size + b"end"
        assert (outcome[1], outcome.ended.code) == (b"out\n", 7)

    def test_a_file_says_nothing_while_the_process_runs(self, agent: AgentClient) -> None:
        fds = [Fd(0, INPUT), Fd(1, OUTPUT), Fd(247, FdKind.FILE)]
        exec_id = agent.shell("echo early >&247; echo ready; read x", fds=fds)
        assert agent.wait_output(exec_id, b"ready\n")[247] == b""
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert agent.wait_exit(exec_id)[247] == b"early\n"

    def test_a_file_of_no_end_is_cut(self, agent: AgentClient) -> None:
        outcome = agent.run("truncate -s 1G /proc/self/fd/247", fds=[*PLAIN, Fd(247, FdKind.FILE)])
        assert len(outcome[247]) == 64 << 20

    def test_state_descriptor(self, agent: AgentClient) -> None:
        outcome = agent.run("echo out; echo state >&247; exit 7", fds=[*PLAIN, Fd(247, OUTPUT)])
        assert (outcome[1], outcome[247], outcome.ended.code) == (b"out\n", b"state\n", 7)

    def test_numbers_may_cross(self, agent: AgentClient) -> None:
        numbers = [254, 12, 11, 10, 3, 4, 5, 6, 7, 8, 9, 20, 2, 1]
        script = "".join(f"echo {n} >&{n};" for n in numbers)
        outcome = agent.run(script, fds=[Fd(n, OUTPUT) for n in numbers])
        assert {n: outcome[n] for n in numbers} == {n: b"%d\n" % n for n in numbers}

    def test_all_descriptors(self, agent: AgentClient) -> None:
        numbers = [n for n in range(255) if n != 0]
        script = "import os\nfor n in range(1, 255): os.write(n, b'%d' % n)"
        outcome = agent.wait_exit(agent.start("python3", "-c", script, fds=[Fd(n, OUTPUT) for n in numbers]))
        assert {n: outcome[n] for n in numbers} == {n: b"%d" % n for n in numbers}


class TestStreams:
    def test_ten_megabytes_both_ways(self, agent: AgentClient) -> None:
        data = os.urandom(1 << 20) * 10
        exec_id = agent.start("cat", fds=WITH_INPUT)
        send_input(agent, exec_id, data)
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        outcome = agent.wait_gone(exec_id)
        assert outcome.ended.code == 0
        assert hashlib.sha256(outcome[1]).digest() == hashlib.sha256(data).digest()

    def test_large_output(self, agent: AgentClient) -> None:
        outcome = agent.run("head -c 30000000 /dev/zero | tr '\\0' x")
        assert outcome[1] == b"x" * 30_000_000

    def test_many_small_writes(self, agent: AgentClient) -> None:
        outcome = agent.run("for i in {1..20000}; do echo $i; done")
        assert outcome[1] == b"".join(b"%d\n" % i for i in range(1, 20001))

    def test_several_loud_ones_do_not_mix(self, agent: AgentClient) -> None:
        ids = [agent.shell(f"yes {i} | head -c 4000000") for i in range(4)]
        for i, exec_id in enumerate(ids):
            assert agent.wait_gone(exec_id)[1] == (b"%d\n" % i) * 2_000_000

    def test_output_comes_while_it_runs(self, agent: AgentClient) -> None:
        exec_id = agent.shell("while read line; do echo got $line; done", fds=WITH_INPUT)
        for word in (b"one", b"two", b"three"):
            agent.send(wire.frame(Ask.DATA, exec_id, 0, word + b"\n"))
            agent.wait_output(exec_id, b"got " + word)
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert agent.wait_exit(exec_id).ended.code == 0

    def test_end_of_file_is_told_while_the_process_lives(self, agent: AgentClient) -> None:
        exec_id = agent.shell("echo x; exec >&- 2>&-; read", fds=WITH_INPUT)
        outcome = agent.execs[exec_id]
        agent.pump_until(lambda: any(f.type == Tell.CLOSE and f.channel == 1 for f in outcome.frames))
        assert outcome.exit is None
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        assert agent.wait_exit(exec_id).ended.code == 1

    def test_unread_input_is_told(self, agent: AgentClient) -> None:
        fds = [Fd(0, INPUT), Fd(1, OUTPUT), Fd(5, INPUT)]
        exec_id = agent.shell("exec 5<&-; echo closed; read", fds=fds)
        outcome = agent.wait_output(exec_id, b"closed")
        agent.send(wire.frame(Ask.DATA, exec_id, 5, b"nobody wants this"))
        agent.pump_until(lambda: any(f.type == Tell.CLOSE and f.channel == 5 for f in outcome.frames))
        agent.send(wire.frame(Ask.DATA, exec_id, 5, b"still on its way"))  # no error
        agent.send(wire.frame(Ask.CLOSE, exec_id, 5), wire.frame(Ask.CLOSE, exec_id, 0))
        assert agent.wait_exit(exec_id).ended.code == 1

    def test_input_that_is_never_read(self, agent: AgentClient) -> None:
        exec_id = agent.start("sleep", "100", fds=WITH_INPUT)
        agent.send(*wire.data_frames(Ask.DATA, exec_id, 0, bytes(wire.INPUT_CREDIT)))
        assert agent.run("echo prompt")[1] == b"prompt\n"
        agent.send(wire.kill_frame(exec_id, 0))
        assert agent.wait_gone(exec_id).ended.cause is Cause.KILLED

    def test_input_for_a_process_that_ended(self, agent: AgentClient) -> None:
        exec_id = agent.start("true", fds=WITH_INPUT)
        agent.send(*wire.data_frames(Ask.DATA, exec_id, 0, bytes(200_000)))
        agent.wait_gone(exec_id)
        agent.send(
            wire.frame(Ask.DATA, exec_id, 0, b"late"),
            wire.frame(Ask.CLOSE, exec_id, 0),
            wire.credit(Ask.CREDIT, exec_id, 1, 1),
            wire.kill_frame(exec_id, 0),
            wire.signal_frame(exec_id, 15),
            wire.timer_frame(exec_id, 1, 1),
        )
        assert agent.run("echo fine")[1] == b"fine\n"

    def test_close_comes_after_the_data(self, agent: AgentClient) -> None:
        exec_id = agent.shell("sleep 0.05; wc -c", fds=WITH_INPUT)
        agent.send(
            *wire.data_frames(Ask.DATA, exec_id, 0, bytes(wire.INPUT_CREDIT)),
            wire.frame(Ask.CLOSE, exec_id, 0),
        )
        assert agent.wait_exit(exec_id)[1] == b"%d\n" % wire.INPUT_CREDIT

    def test_a_process_that_eats_its_own_output(self, agent: AgentClient) -> None:
        """It may lose bytes to itself; EXIT must come all the same."""
        script = (
            "head -c 60000 /dev/zero; timeout 0.2 cat </proc/$$/fd/1 >/dev/null & head -c 60000 /dev/zero"
        )
        exec_id = agent.shell(script + "; (timeout 0.2 cat </proc/$$/fd/1 >/dev/null &); exit 3")
        assert agent.wait_gone(exec_id).ended.code == 3


class TestCredit:
    def test_a_loud_process_waits_and_others_go_on(self, agent: AgentClient) -> None:
        agent.auto_credit = False
        loud = agent.start("yes")
        outcome = agent.execs[loud]
        agent.pump_until(lambda: len(outcome[1]) >= wire.OUTPUT_CREDIT)
        began = time.monotonic()
        assert agent.run("echo prompt")[1] == b"prompt\n"
        assert time.monotonic() - began < 1
        agent.pump_for(0.1)
        assert len(outcome[1]) == wire.OUTPUT_CREDIT
        agent.send(wire.credit(Ask.CREDIT, loud, 1, 1000))
        agent.pump_until(lambda: len(outcome[1]) >= wire.OUTPUT_CREDIT + 1000)
        agent.pump_for(0.05)
        assert len(outcome[1]) == wire.OUTPUT_CREDIT + 1000
        agent.send(wire.kill_frame(loud, 0))
        # What was in the pipe then still comes, and EXIT after it.
        agent.auto_credit = True
        agent.send(wire.credit(Ask.CREDIT, loud, 1, wire.OUTPUT_CREDIT))
        agent.wait_gone(loud)
        assert outcome.ended.cause is Cause.KILLED

    def test_loud_ones_with_credit_do_not_silence_others(self, agent: AgentClient) -> None:
        loud = [agent.start("yes") for _ in range(3)]
        for exec_id in loud:
            agent.wait_output(exec_id, b"y\n")
        began = time.monotonic()
        for _ in range(5):
            assert agent.run("echo prompt")[1] == b"prompt\n"
        assert time.monotonic() - began < 2.5
        for exec_id in loud:
            agent.send(wire.kill_frame(exec_id, 0))
        for exec_id in loud:
            agent.wait_gone(exec_id)

    def test_exit_waits_for_credit_and_loses_nothing(self, agent: AgentClient) -> None:
        agent.auto_credit = False
        size = wire.OUTPUT_CREDIT + 50_000
        exec_id = agent.shell(f"head -c {size} /dev/zero")
        outcome = agent.execs[exec_id]
        agent.pump_until(lambda: len(outcome[1]) == wire.OUTPUT_CREDIT)
        assert agent.run("true").ended.code == 0
        agent.pump_for(0.05)
        assert outcome.exit is None
        agent.send(wire.credit(Ask.CREDIT, exec_id, 1, wire.OUTPUT_CREDIT))
        assert agent.wait_gone(exec_id)[1] == bytes(size)

    def test_memory_is_bounded_when_the_client_does_not_read(self, agent: AgentClient) -> None:
        began = resident_kib(agent.process.pid)
        loud = [agent.start("yes") for _ in range(20)]
        waiting = agent.start("sleep", "100", fds=WITH_INPUT)
        agent.send(*wire.data_frames(Ask.DATA, waiting, 0, bytes(wire.INPUT_CREDIT)))
        wait_until_blocked(agent)
        assert resident_kib(agent.process.pid) - began < 25_000
        for exec_id in (*loud, waiting):
            agent.send(wire.kill_frame(exec_id, 0))
        for exec_id in (*loud, waiting):
            agent.wait_gone(exec_id)

    def test_input_credit_comes_back_in_large_pieces(self, agent: AgentClient) -> None:
        exec_id = agent.start("wc", "-c", fds=WITH_INPUT)
        send_input(agent, exec_id, bytes(3_000_000))
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        outcome = agent.wait_exit(exec_id)
        assert outcome[1] == b"3000000\n"
        assert len([f for f in outcome.frames if f.type == Tell.CREDIT]) < 350


class TestBackground:
    def test_exit_comes_at_once_and_gone_later(self, agent: AgentClient) -> None:
        exec_id = agent.shell("sleep 100 & echo $!")
        outcome = agent.wait_exit(exec_id)
        assert outcome.ended.cause is Cause.ENDED
        (child,) = pids(outcome[1])
        assert is_alive(child)
        assert agent.run("true").ended.code == 0
        assert not outcome.gone
        os.kill(child, signal.SIGTERM)
        agent.wait_gone(exec_id)

    def test_its_output_is_dropped_and_does_not_end_it(self, agent: AgentClient, tmp_path: Path) -> None:
        done = tmp_path / "done"
        os.mkfifo(done)
        exec_id = agent.shell(f"{{ head -c 5000000 /dev/zero; echo $? > {done}; }} & echo first")
        outcome = agent.wait_exit(exec_id)
        assert outcome[1].replace(b"\0", b"") == b"first\n"
        # Nobody pumps here: the agent must drain by itself.
        assert done.read_text() == "0\n"
        agent.wait_gone(exec_id)

    def test_an_endless_writer_does_not_delay_exit(self, agent: AgentClient) -> None:
        exec_id = agent.shell("yes & exit 5")
        assert agent.wait_exit(exec_id).ended.code == 5
        agent.send(wire.kill_frame(exec_id, 0))
        agent.wait_gone(exec_id)

    def test_kill_after_exit_ends_what_is_left(self, agent: AgentClient) -> None:
        exec_id = agent.shell("(trap '' TERM; sleep 100 & echo $!); setsid sleep 100 & echo $!")
        outcome = agent.wait_exit(exec_id)
        assert len(pids(outcome[1])) == 2
        agent.send(wire.kill_frame(exec_id, 20))
        agent.wait_gone(exec_id)
        assert not any(map(is_alive, pids(outcome[1])))

    def test_orphans_keep_their_exec(self, agent: AgentClient) -> None:
        exec_id = agent.shell("(setsid bash -c 'echo $$; exec sleep 100' &); read", fds=WITH_INPUT)
        outcome = agent.wait_output(exec_id, b"\n")
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        agent.wait_exit(exec_id)
        (orphan,) = pids(outcome[1])
        assert is_alive(orphan)
        kill_quietly(orphan)
        agent.wait_gone(exec_id)


HARD_TO_KILL = """
trap '' TERM
setsid bash -c 'trap "" TERM; echo $$; while :; do sleep 100; done' &
(env -i PATH="$PATH" setsid bash -c 'trap "" TERM INT HUP; echo $$; (while :; do sleep 100; done) & wait' &)
python3 -c 'import os, time
with open("/proc/self/comm", "w") as f: f.write("a) S 1 (")
print(os.getpid(), flush=True); time.sleep(100)' &
sleep 100 & kill -STOP $!; echo $!
echo $$
while :; do sleep 100; done
"""


class TestKill:
    def test_term_is_enough(self, agent: AgentClient) -> None:
        exec_id = agent.shell(
            "trap 'echo bye; exit 9' TERM; echo ready; while :; do read; done", fds=WITH_INPUT
        )
        agent.wait_output(exec_id, b"ready")
        agent.send(wire.kill_frame(exec_id, 20_000))
        outcome = agent.wait_gone(exec_id)
        assert outcome.ended.cause is Cause.KILLED
        assert outcome.ended.code == 9
        assert outcome[1] == b"ready\nbye\n"

    @pytest.mark.parametrize("grace", [0, 50])
    def test_all_that_hides(self, agent: AgentClient, grace: int) -> None:
        bystander = agent.shell("setsid sleep 100 & echo $!; wait")
        agent.wait_output(bystander, b"\n")
        exec_id = agent.shell(HARD_TO_KILL)
        outcome = agent.execs[exec_id]
        agent.pump_until(lambda: len(outcome[1].split()) == 5)
        began = time.monotonic()
        agent.send(wire.kill_frame(exec_id, grace))
        agent.wait_exit(exec_id)
        assert not any(map(is_alive, pids(outcome[1])))
        assert time.monotonic() - began < 2
        assert outcome.ended.cause is Cause.KILLED
        assert outcome.ended.code == -signal.SIGKILL
        assert not outcome.ended.survivors
        agent.wait_gone(exec_id)
        assert all(map(is_alive, pids(agent.execs[bystander][1])))

    def test_a_crowd_that_keeps_forking(self, agent: AgentClient) -> None:
        script = """
        f() { trap '' TERM; while :; do (sleep 0.002 &); sleep 0.01; done; }
        for i in 1 2 3 4; do f & done; echo up; wait
        """
        exec_id = agent.shell(script)
        agent.wait_output(exec_id, b"up")
        agent.send(wire.kill_frame(exec_id, 30))
        outcome = agent.wait_gone(exec_id)
        assert outcome.ended.cause is Cause.KILLED
        assert not outcome.ended.survivors

    def test_exit_waits_for_the_whole_tree(self, agent: AgentClient) -> None:
        script = "(trap '' TERM; echo $BASHPID; while :; do sleep 1; done) & trap 'exit 3' TERM; wait"
        exec_id = agent.shell(script)
        agent.wait_output(exec_id, b"\n")
        agent.send(wire.kill_frame(exec_id, 200))
        outcome = agent.wait_exit(exec_id)
        assert not any(map(is_alive, pids(outcome[1])))
        assert outcome.ended.cause is Cause.KILLED

    def test_output_before_the_kill_is_kept(self, agent: AgentClient) -> None:
        exec_id = agent.shell("head -c 300000 /dev/zero; echo end; sleep 100")
        agent.wait_output(exec_id, b"end")
        agent.send(wire.kill_frame(exec_id, 0))
        assert agent.wait_exit(exec_id)[1] == bytes(300_000) + b"end\n"

    def test_timer(self, agent: AgentClient) -> None:
        exec_id = agent.shell("trap '' TERM; echo up; while :; do sleep 1; done")
        agent.send(wire.timer_frame(exec_id, 100, 50))
        outcome = agent.wait_gone(exec_id)
        assert outcome.ended.cause is Cause.TIMER
        assert outcome.ended.code == -signal.SIGKILL
        assert 0.1 <= outcome.ended.wall_seconds < 5

    def test_timer_that_is_cancelled_or_too_late(self, agent: AgentClient) -> None:
        cancelled = agent.shell("sleep 0.3")
        agent.send(wire.timer_frame(cancelled, 50, 0), wire.timer_frame(cancelled, 0, 0))
        late = agent.shell("sleep 0.4 & exit 4")
        agent.send(wire.timer_frame(late, 200, 0))
        assert agent.wait_exit(late).ended.code == 4
        assert agent.wait_gone(cancelled).ended.cause is Cause.ENDED
        assert agent.wait_gone(late).ended.cause is Cause.ENDED

    def test_kill_cuts_a_long_grace_short(self, agent: AgentClient) -> None:
        exec_id = agent.shell("trap '' TERM; echo up; while :; do sleep 1; done")
        agent.wait_output(exec_id, b"up")
        agent.send(wire.kill_frame(exec_id, 100_000), wire.kill_frame(exec_id, 10))
        assert agent.wait_gone(exec_id, 5).ended.cause is Cause.KILLED

    def test_signal_reaches_everything(self, agent: AgentClient) -> None:
        script = """
        setsid bash -c 'trap "echo child; exit" USR1; echo up; while :; do sleep 0.01; done' &
        trap 'echo parent; wait; exit 6' USR1; echo up; while :; do sleep 0.01; done
        """
        exec_id = agent.shell(script)
        agent.pump_until(lambda: agent.execs[exec_id][1].count(b"up") == 2)
        agent.send(wire.signal_frame(exec_id, signal.SIGUSR1))
        outcome = agent.wait_exit(exec_id)
        assert b"child\n" in outcome[1]
        assert b"parent\n" in outcome[1]
        assert (outcome.ended.cause, outcome.ended.code) == (Cause.ENDED, 6)

    def test_signals_to_the_supervisor_change_nothing(self, agent: AgentClient) -> None:
        script = "for s in HUP INT QUIT TERM USR1 USR2 ALRM PIPE; do kill -$s $PPID; done; sleep 0.05; exit 8"
        outcome = agent.run(script)
        assert (outcome.ended.cause, outcome.ended.code) == (Cause.ENDED, 8)

    def test_killed_supervisor(self, agent: AgentClient) -> None:
        bystander = agent.shell("sleep 100 & echo $!; wait")
        agent.wait_output(bystander, b"\n")
        script = "setsid sleep 100 & echo $!; (trap '' TERM; exec sleep 100) & echo $! $$; "
        script += "kill -9 $PPID; sleep 100"
        outcome = agent.wait_gone(agent.shell(script))
        assert outcome.ended.cause is Cause.SUPERVISOR_LOST
        assert len(pids(outcome[1])) == 3
        assert not any(map(is_alive, pids(outcome[1])))
        assert all(map(is_alive, pids(agent.execs[bystander][1])))
        assert agent.run("echo fine")[1] == b"fine\n"

    def test_supervisor_killed_after_exit(self, agent: AgentClient) -> None:
        exec_id = agent.shell("sleep 100 & echo $! $PPID")
        outcome = agent.wait_exit(exec_id)
        child, supervisor = pids(outcome[1])
        kill_quietly(supervisor)
        agent.wait_gone(exec_id)
        assert not is_alive(child)

    def test_stopping_the_supervisor_does_not_hide_the_end(self, agent: AgentClient) -> None:
        outcome = agent.run("kill -STOP $PPID; echo said; exit 3")
        assert (outcome[1], outcome.ended.code, outcome.ended.cause) == (b"said\n", 3, Cause.ENDED)

    def test_stopped_supervisor(self, agent: AgentClient) -> None:
        exec_id = agent.shell("kill -STOP $PPID; echo $$; sleep 100")
        outcome = agent.wait_output(exec_id, b"\n")
        agent.send(wire.kill_frame(exec_id, 10))
        agent.wait_gone(exec_id)
        assert not any(map(is_alive, pids(outcome[1])))


class TestEnd:
    def busy(self, agent: AgentClient) -> list[int]:
        first, second = agent.shell(HARD_TO_KILL), agent.shell("sleep 100 & echo $!")
        agent.pump_until(lambda: len(agent.execs[first][1].split()) == 5)
        agent.wait_exit(second)
        return pids(agent.execs[first][1]) + pids(agent.execs[second][1])

    def test_end_of_file(self, agent: AgentClient) -> None:
        everything = self.busy(agent)
        agent.hang_up()
        assert agent.process.wait(5) == 0
        assert not any(map(is_alive, everything))

    def test_end_of_file_with_a_client_that_does_not_read(self, agent: AgentClient) -> None:
        for _ in range(3):
            agent.start("yes")
        wait_until_blocked(agent)
        agent.hang_up()
        assert agent.process.wait(8) == 0

    def test_idle_agent_ends(self, agent: AgentClient) -> None:
        agent.hang_up()
        assert agent.process.wait(5) == 0

    def test_killed_agent(self, agent: AgentClient) -> None:
        everything = self.busy(agent)
        agent.process.kill()
        agent.process.wait()
        wait_dead(everything, 5)

    def test_terminated_agent(self, agent: AgentClient) -> None:
        everything = self.busy(agent)
        agent.process.terminate()
        agent.process.wait(5)
        wait_dead(everything, 5)

    def test_no_zombies(self, agent: AgentClient) -> None:
        for exec_id in [agent.shell("(sleep 0.01 &) ; true") for _ in range(10)]:
            agent.wait_gone(exec_id)
        children = Path(f"/proc/{agent.process.pid}/task/{agent.process.pid}/children")

        def zombies() -> list[int]:
            return [pid for pid in pids(children.read_bytes()) if not is_alive(pid)]

        deadline = time.monotonic() + 30
        while zombies() and time.monotonic() < deadline:
            os.sched_yield()
        assert zombies() == []


def header(length: int, type_: int, channel: int = 0, reserved: int = 0, exec_id: int = 0) -> bytes:
    return wire._HEADER.pack(length, type_, channel, reserved, exec_id)


def start_fields(*fields: tuple[int, bytes]) -> bytes:
    payload = b"".join(wire._FIELD.pack(tag, len(value)) + value for tag, value in fields)
    return header(len(payload), Ask.START, exec_id=77) + payload


MALFORMED = {
    "over-long": header((1 << 20) + 1, Ask.DATA),
    "gigantic": header(0xFFFFFFFF, Ask.START, exec_id=1),
    "unknown type": header(0, 99),
    "type zero": header(0, 0),
    "answer type": header(0, Tell.HELLO),
    "reserved": header(0, Ask.CLOSE, reserved=1),
    "short KILL": header(3, Ask.KILL) + b"abc",
    "long TIMER": header(9, Ask.TIMER) + bytes(9),
    "full CLOSE": header(1, Ask.CLOSE) + b"x",
    "empty SIGNAL": header(0, Ask.SIGNAL),
    "empty CREDIT": header(0, Ask.CREDIT),
    "empty START": header(0, Ask.START, exec_id=1),
    "START without arguments": start_fields((2, b"A=1")),
    "NUL in an argument": start_fields((1, b"a\0b")),
    "unknown field": start_fields((1, b"true"), (9, b"")),
    "field head cut off": header(3, Ask.START, exec_id=1) + b"\1\0\0",
    "field cut off": header(7, Ask.START, exec_id=1) + b"\1\xff\xff\xff\xffab",
    "descriptor 255": start_fields((1, b"true"), (4, b"\xff\0")),
    "descriptor twice": start_fields((1, b"true"), (4, b"\1\2"), (4, b"\1\2")),
    "same as nothing": start_fields((1, b"true"), (4, b"\2\4\1")),
    "same as itself": start_fields((1, b"true"), (4, b"\1\4\1")),
    "unknown kind": start_fields((1, b"true"), (4, b"\1\7")),
    "full PING": header(1, Ask.PING) + b"x",
    "terminal without a size": start_fields((1, b"true"), (4, b"\0\6")),
    "terminal of half a size": start_fields((1, b"true"), (4, b"\0\6\1\0\1")),
    "two terminals": start_fields((1, b"true"), (4, b"\0\6\1\0\1\0"), (4, b"\1\6\1\0\1\0")),
    "READ without a path": header(16, Ask.READ, exec_id=1) + bytes(16),
    "READ with a NUL": header(19, Ask.READ, exec_id=1) + bytes(16) + b"a\0b",
    "READ without an id": wire.read_frame(0, b"/etc/passwd"),
    "short READ": header(5, Ask.READ, exec_id=1) + b"abcde",
    "WRITE without a path": header(5, Ask.WRITE, exec_id=1) + bytes(5),
    "WRITE with a NUL": header(7, Ask.WRITE, exec_id=1) + bytes(5) + b"\0b",
    "WRITE of an unknown flag": header(7, Ask.WRITE, exec_id=1) + b"\0\0\0\0\2ab",
    "WRITE of an odd mode": header(7, Ask.WRITE, exec_id=1) + b"\0\0\1\0\0ab",
    "empty WRITE": header(0, Ask.WRITE, exec_id=1),
    "short RESIZE": header(3, Ask.RESIZE) + b"abc",
    "short descriptor": start_fields((1, b"true"), (4, b"\1")),
    "long descriptor": start_fields((1, b"true"), (4, b"\1\2x")),
}


def expect_error(agent: AgentClient) -> None:
    agent.pump_to_end()
    assert agent.error
    assert agent.process.wait(5) == 3


class TestMalformed:
    @pytest.mark.parametrize("what", MALFORMED)
    def test_frame(self, connect: Connect, what: str) -> None:
        agent = connect()
        agent.greet()
        running = agent.shell("echo $$; sleep 100")
        agent.wait_output(running, b"\n")
        agent.send(MALFORMED[what])
        expect_error(agent)
        assert not any(map(is_alive, pids(agent.execs[running][1])))

    @pytest.mark.parametrize("greeting", [b"GET / HTTP/1.0\r\n\r\n", b"\0HCRAB\2\0", b"\0HCRAX\1\0", b"x"])
    def test_greeting(self, connect: Connect, greeting: bytes) -> None:
        agent = connect()
        agent.send(greeting)
        expect_error(agent)

    def test_id_in_use(self, agent: AgentClient) -> None:
        exec_id = agent.start("sleep", "100")
        agent.send(wire.start_frame(exec_id, Start([b"true"])))
        expect_error(agent)

    def test_data_beyond_the_credit(self, agent: AgentClient) -> None:
        exec_id = agent.start("sleep", "100", fds=WITH_INPUT)
        agent.send(
            wire.frame(Ask.DATA, exec_id, 0, bytes(wire.INPUT_CREDIT)),
            wire.frame(Ask.DATA, exec_id, 0, bytes(70_000)),
        )
        expect_error(agent)

    @pytest.mark.parametrize(
        "frame_of",
        [
            lambda exec_id: wire.frame(Ask.DATA, exec_id, 1, b"x"),
            lambda exec_id: wire.frame(Ask.DATA, exec_id, 9, b"x"),
            lambda exec_id: wire.frame(Ask.CLOSE, exec_id, 9),
            lambda exec_id: wire.credit(Ask.CREDIT, exec_id, 0, 1),
            lambda exec_id: wire.resize_frame(exec_id, 1, 24, 80),
        ],
        ids=[
            "DATA to an output",
            "DATA to nothing",
            "CLOSE of nothing",
            "CREDIT for an input",
            "RESIZE of a pipe",
        ],
    )
    def test_wrong_channel(self, connect: Connect, frame_of: Callable[[int], bytes]) -> None:
        agent = connect()
        agent.greet()
        exec_id = agent.start("sleep", "100", fds=WITH_INPUT)
        agent.send(frame_of(exec_id))
        expect_error(agent)

    def test_data_after_close(self, agent: AgentClient) -> None:
        exec_id = agent.start("sleep", "100", fds=WITH_INPUT)
        agent.send(wire.frame(Ask.CLOSE, exec_id, 0), wire.frame(Ask.DATA, exec_id, 0, b"x"))
        expect_error(agent)

    def test_unknown_ids_are_ignored(self, agent: AgentClient) -> None:
        agent.send(
            wire.frame(Ask.DATA, 999, 0, b"x"),
            wire.frame(Ask.CLOSE, 999, 0),
            wire.credit(Ask.CREDIT, 999, 1, 1),
            wire.signal_frame(999, 9),
            wire.kill_frame(999, 0),
            wire.timer_frame(999, 1, 0),
        )
        assert agent.run("echo fine")[1] == b"fine\n"

    def test_cut_off_frame_is_an_end_of_file(self, agent: AgentClient) -> None:
        agent.send(header(1000, Ask.DATA) + b"abc")
        agent.hang_up()
        assert agent.process.wait(5) == 0

    def test_byte_by_byte(self, connect: Connect) -> None:
        agent = connect()
        exec_id = agent.new_id()
        start = wire.start_frame(exec_id, Start([b"cat"], WITH_INPUT, ENV))
        stream = (
            wire.PREAMBLE + start + wire.frame(Ask.DATA, exec_id, 0, b"abc") + wire.frame(Ask.CLOSE, exec_id)
        )
        for i in range(len(stream)):
            agent.send(stream[i : i + 1])
        assert agent.wait_gone(exec_id)[1] == b"abc"


class TestScarcity:
    def test_many_at_once(self, agent: AgentClient) -> None:
        ids = [agent.shell(f"echo {i}; read; exit {i % 100}", fds=WITH_INPUT) for i in range(200)]
        for exec_id in ids:
            agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
        for i, exec_id in enumerate(ids):
            outcome = agent.wait_gone(exec_id, 60)
            assert (outcome[1], outcome.ended.code) == (b"%d\n" % i, i % 100)

    def test_descriptors_run_out(self, command: list[str]) -> None:
        with AgentClient(["bash", "-c", 'ulimit -n 64; exec "$@"', "bash", *command]) as agent:
            agent.greet()
            before = open_descriptors(agent.process.pid)
            ids = [agent.start("cat", fds=WITH_INPUT) for _ in range(40)]
            for exec_id in ids:
                agent.send(wire.frame(Ask.CLOSE, exec_id, 0))
            ended = [agent.wait_gone(exec_id).ended for exec_id in ids]
            failed = [e for e in ended if e.cause is Cause.NOT_STARTED]
            assert 10 < len(failed) < 40
            # The C libraries word it differently.
            assert all(
                e.code == 126 and ("open files" in e.reason or "descriptors" in e.reason) for e in failed
            )
            assert all(e.code == 0 for e in ended if e.cause is Cause.ENDED)
            assert agent.run("echo fine")[1] == b"fine\n"
            assert open_descriptors(agent.process.pid) <= before + 3

    @pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's process limit")
    def test_processes_run_out(self, c_agent: str) -> None:
        # The new user may not reach the file: the shell opens it first.
        limit = 'exec 9<"$0"; exec setpriv --reuid=54321 --clear-groups prlimit --nproc=12 /proc/self/fd/9'
        with AgentClient(["bash", "-c", limit, c_agent]) as agent:
            agent.greet()
            ids = [agent.start("sleep", "100") for _ in range(20)]
            for exec_id in ids:
                agent.send(wire.kill_frame(exec_id, 0))
            ended = [agent.wait_gone(exec_id).ended for exec_id in ids]
            failed = [e for e in ended if e.cause is Cause.NOT_STARTED]
            assert failed
            assert all(e.code == 126 and "Resource temporarily unavailable" in e.reason for e in failed)
            assert agent.run("echo fine")[1] == b"fine\n"

    @pytest.mark.slow
    @pytest.mark.skipif(os.geteuid() != 0, reason="needs to change its user")
    def test_survivors_are_told(self, command: list[str]) -> None:
        """As in a container without CAP_KILL, where a command became another user."""
        with AgentClient(["setpriv", "--bounding-set=-kill", *command]) as agent:
            agent.greet()
            exec_id = agent.start(
                "setpriv", "--reuid=54321", "--clear-groups", "bash", "-c", "echo $$; sleep 4"
            )
            outcome = agent.wait_output(exec_id, b"\n")
            agent.send(wire.kill_frame(exec_id, 10))
            agent.wait_exit(exec_id)
            assert outcome.ended.survivors
            assert outcome.ended.cause is Cause.KILLED
            agent.wait_gone(exec_id)


def send_input(agent: AgentClient, exec_id: int, data: bytes) -> None:
    """As a client that keeps to its credit, until nobody wants more."""
    outcome = agent.execs[exec_id]
    at, counted, credit = 0, 0, wire.INPUT_CREDIT

    def refill() -> bool:
        nonlocal counted, credit
        for frame in outcome.frames[counted:]:
            if frame.type == Tell.CREDIT:
                credit += wire.parse_u32(frame.payload)
        counted = len(outcome.frames)
        return credit > 0 or outcome.exit is not None

    while at < len(data):
        agent.pump_until(refill)
        if outcome.exit is not None:
            return
        piece = data[at : at + min(credit, 100_000)]
        agent.send(wire.frame(Ask.DATA, exec_id, 0, piece))
        at += len(piece)
        credit -= len(piece)


def wait_until_blocked(agent: AgentClient) -> None:
    """Until the agent has filled its pipe to us and rests."""
    assert select.select([agent.read_fd], [], [], 10)[0]
    last, deadline = -1, time.monotonic() + 10
    while (used := cpu_ticks(agent.process.pid)) != last:
        assert time.monotonic() < deadline, "the agent does not come to rest"
        last = used
        time.sleep(0.1)  # rest is the absence of events


def cpu_ticks(pid: int) -> int:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(words[11]) + int(words[12])


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
