"""Output while a command runs, and processes to hold on to."""

from __future__ import annotations

import signal
import time

from hermitcrab.result import INTERRUPTED, TIMED_OUT, Outcome
from hermitcrab.testing.inside import PATIENCE, alive, pids_in, raised, read_until, say, scratch, value, works
from hermitcrab.testing.suite import Opener, case

MB = 1 << 20


@case
def output_can_be_read_while_the_command_runs(open: Opener) -> None:
    """The first piece of output is there before the command ends."""
    env = open()
    scratch(env)
    say(env, "mkfifo go")
    running = env.stream("echo first; cat go; echo last", timeout=PATIENCE)
    assert read_until(running, "first\n") == "first\n"
    assert running.running
    say(env, "echo second >go")
    assert "".join(running) == "second\nlast\n"
    result = running.wait(PATIENCE)
    assert (result.output, result.returncode) == ("first\nsecond\nlast\n", 0)
    assert not running.running


@case
def a_streamed_command_is_as_any_other(open: Opener) -> None:
    """It sees the session's state, changes it, has its limit, its status and its result."""
    env = open(kill_grace=0.1)
    say(env, "v=1; f() { echo f $v; }; cd /usr")
    running = env.stream("f; pwd; v=2; cd /; exit 5")
    assert "".join(running) == "f 1\n/usr\n"
    assert running.wait(PATIENCE).returncode == 5
    assert (value(env, "v"), env.cwd) == ("2", "/")
    limited = env.stream("echo up; sleep 600", timeout=0.3)
    assert "".join(limited) == "up\n"
    assert limited.wait(PATIENCE).outcome is Outcome.TIMED_OUT
    assert env.stream("exit 3", "/no/such/place").wait(PATIENCE).returncode == 126


@case
def pieces_say_which_stream_they_came_from(open: Opener) -> None:
    """With `separate`, each piece of bytes carries its channel."""
    env = open()
    running = env.stream("echo out; echo err >&2; sleep 0; echo out", separate=True)
    pieces = list(running.chunks())
    assert b"".join(data for channel, data in pieces if channel == 1) == b"out\nout\n"
    assert b"".join(data for channel, data in pieces if channel == 2) == b"err\n"
    assert running.wait(PATIENCE).stderr == "err\n"


@case
def a_streamed_character_is_not_cut(open: Opener) -> None:
    """Text that is read while it comes has whole characters only."""
    env = open()
    pieces = list(env.stream("printf '\\xf0\\x9f'; sleep 0.1; printf '\\xa6\\x80!'; printf '\\xff'"))
    assert "".join(pieces) == "\U0001f980!\ufffd"


@case
def a_slow_reader_makes_the_command_wait(open: Opener) -> None:
    """Who reads slowly holds the command up, not memory; and gets every byte."""
    env = open(output_limit=4096)
    scratch(env)
    total = 40 * MB
    running = env.stream(f"head -c {total} /dev/zero | tr '\\0' x; echo; echo done >done")
    pieces = running.chunks()
    received = len(next(pieces).data)
    time.sleep(0.7)
    assert running.running, "it did not wait for its reader"
    assert env.execute("test -e done").returncode != 0
    received += sum(len(piece.data) for piece in pieces)
    assert received == total + 1
    assert running.wait(PATIENCE).returncode == 0


@case
def input_can_be_written_while_the_command_runs(open: Opener) -> None:
    """`stream(stdin=True)` holds a conversation."""
    env = open()
    running = env.stream(
        'while read -r line; do echo "got $line"; done; echo end', stdin=True, timeout=PATIENCE
    )
    for word in ("one", "two"):
        running.write(f"{word}\n")
        assert read_until(running, "\n") == f"got {word}\n"
    running.close_stdin()
    assert "".join(running) == "end\n"
    assert running.wait(PATIENCE).returncode == 0


@case
def an_interrupted_stream_ends(open: Opener) -> None:
    """The iteration over an interrupted command's output comes to its end."""
    env = open(kill_grace=0.1)
    running = env.stream("echo up; sleep 600")
    read_until(running, "up\n")
    assert env.interrupt() == 1
    assert "".join(running) == ""
    assert running.wait(PATIENCE).returncode == INTERRUPTED
    works(env)


@case
def a_stream_that_nobody_reads_gives_its_result(open: Opener) -> None:
    """`wait` without iterating is enough, however much is printed."""
    env = open(output_limit=4096)
    result = env.stream("seq 2000000").wait(PATIENCE)
    assert result.output.endswith("\n2000000\n")


@case
def a_started_process_sees_the_state_and_leaves_it(open: Opener) -> None:
    """`start` begins where the session is, and whatever it does to its own shell stays there."""
    env = open()
    say(env, "v=1; export e=2; f() { echo f; }; alias a='echo a'; cd /usr")
    process = env.start("echo $v $e; f; a; pwd; v=9; cd /; f() { echo changed; }")
    assert process.wait(PATIENCE).output == "1 2\nf\na\n/usr\n"
    assert say(env, "echo $v; f; pwd") == "1\nf\n/usr"


@case
def a_started_process_is_steered(open: Opener) -> None:
    """Read what is new, write, close its input, and wait for its end."""
    env = open()
    process = env.start('echo up; while read -r line; do echo "got $line"; done; echo over; exit 4')
    assert read_until(process, "up\n") == "up\n"
    assert process.read() == ""
    process.write("one\n")
    assert read_until(process, "\n") == "got one\n"
    process.write(b"two\n")
    process.close_stdin()
    result = process.wait(PATIENCE)
    assert process.read() == "got two\nover\n"
    assert (result.output, result.returncode) == ("up\ngot one\ngot two\nover\n", 4)


@case
def a_started_process_can_be_signalled(open: Opener) -> None:
    """`signal` reaches every process of it."""
    env = open()
    process = env.start("trap 'echo usr1; exit 6' USR1; echo up; while :; do sleep 600 & wait; done")
    read_until(process, "up\n")
    process.signal(signal.SIGUSR1)
    assert process.wait(PATIENCE).returncode == 6
    assert process.read() == "usr1\n"


@case
def a_started_process_can_be_killed(open: Opener) -> None:
    """`kill` ends it and everything that it started, TERM first."""
    env = open(kill_grace=5)
    process = env.start("setsid sleep 600 & echo $!; trap 'echo bye; exit 0' TERM; sleep 601 & echo up; wait")
    (pid,) = pids_in(read_until(process, "up\n"))
    process.kill()
    assert "bye" in process.wait(PATIENCE).output
    assert alive(env, pid) == []
    stubborn = env.start("trap '' TERM; echo up; while :; do sleep 1; done")
    read_until(stubborn, "up\n")
    started = time.monotonic()
    stubborn.kill(grace=0.1)
    assert stubborn.wait(PATIENCE).returncode == 137
    assert time.monotonic() - started < 4


@case
def waiting_for_a_process_may_be_given_up(open: Opener) -> None:
    """`wait(timeout)` raises TimeoutError and leaves the process running."""
    env = open()
    process = env.start("echo up; cat")
    raised(TimeoutError, lambda: process.wait(0.1))
    assert process.running
    process.close_stdin()
    assert process.wait(PATIENCE).output == "up\n"


@case
def what_runs_is_listed(open: Opener) -> None:
    """`processes` lists what was started and still runs, with what was asked for."""
    env = open()
    one, two = env.start("cat # one"), env.start("cat # two")
    assert [(each.id, each.command) for each in env.processes()] == [
        (one.id, "cat # one"),
        (two.id, "cat # two"),
    ]
    two.close_stdin()
    two.wait(PATIENCE)
    assert [each.id for each in env.processes()] == [one.id]
    (same,) = env.processes()
    same.close_stdin()
    assert one.wait(PATIENCE).returncode == 0
    assert env.processes() == []


@case
def a_started_process_outlives_commands_and_their_limits(open: Opener) -> None:
    """Other commands, their time-outs and interrupts do not touch it, nor does the session's own limit."""
    env = open(timeout=0.4, kill_grace=0.1)
    process = env.start("echo up; cat")
    read_until(process, "up\n")
    assert env.execute("sleep 600").returncode == TIMED_OUT
    env.interrupt()
    process.write("still here")
    process.close_stdin()
    assert process.wait(PATIENCE).output == "up\nstill here"


@case
def writing_to_an_ended_process_is_an_error(open: Opener) -> None:
    """A write that nobody can read raises BrokenPipeError, and never hangs."""
    env = open()
    process = env.start("exit 0")
    process.wait(PATIENCE)
    raised(BrokenPipeError, lambda: process.write("too late"))
    process.close_stdin()
    process.kill()


@case
def megabytes_written_to_a_process_arrive(open: Opener) -> None:
    """`write` waits until the process takes what it is given, all of it."""
    env = open()
    process = env.start("wc -c")
    for _ in range(3):
        process.write(b"x" * MB)
    process.close_stdin()
    assert process.wait(PATIENCE).output.strip() == str(3 * MB)


@case
def a_process_that_prints_for_ever_is_bounded(open: Opener) -> None:
    """Without a reader, a started process goes on printing; the last lines are there at its end."""
    env = open(output_limit=4096)
    process = env.start("seq 1000000; echo end")
    result = process.wait(PATIENCE)
    assert result.truncated
    assert result.output.endswith("1000000\nend\n")
    assert result.output_path is not None
    assert result.output_path.stat().st_size == sum(len(f"{i}\n") for i in range(1, 1000001)) + 4
