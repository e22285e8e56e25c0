"""What a command answers."""

from __future__ import annotations

import time

from hermitcrab.errors import CommandError, CommandFailed, CommandInterrupted, CommandTimedOut
from hermitcrab.result import Outcome, Result
from hermitcrab.testing.inside import PATIENCE, raised, read_until
from hermitcrab.testing.suite import Opener, case


@case
def a_result_says_what_happened(open: Opener) -> None:
    """Output, status, outcome, duration and the command itself are in the result."""
    env = open()
    started = time.monotonic()
    result = env.execute("echo hi; sleep 0.1; exit 3")
    elapsed = time.monotonic() - started
    assert (result.output, result.returncode, result.outcome) == ("hi\n", 3, Outcome.COMPLETED)
    assert 0.1 <= result.duration <= elapsed
    assert (result.truncated, result.output_path, result.stdout, result.stderr) == (False, None, None, None)
    assert not result.ok
    assert result.command == "echo hi; sleep 0.1; exit 3"
    assert env.execute("true").ok


@case
def a_result_answers_as_a_mapping(open: Opener) -> None:
    """`result["output"]` and `result["returncode"]` answer; any other key is a KeyError."""
    result = open().execute("echo hi; exit 3")
    assert (result["output"], result["returncode"]) == ("hi\n", 3)
    raised(KeyError, lambda: result["nonsense"])


@case
def a_result_cannot_be_changed(open: Opener) -> None:
    """A result is a value."""
    result = open().execute("true")
    raised(AttributeError, lambda: setattr(result, "output", "other"))
    assert result.output == ""


@case
def check_raises_what_fits(open: Opener) -> None:
    """`check()` gives the result of a success and raises for failure, time-out and interrupt."""
    env = open(kill_grace=0.1)
    assert env.execute("echo fine").check().output == "fine\n"
    running = env.stream("echo up; sleep 600")
    read_until(running, "up")
    running.interrupt()
    fates: list[tuple[Result, type[CommandError]]] = [
        (env.execute("echo why >&2; exit 3"), CommandFailed),
        (env.execute("sleep 600", timeout=0.1), CommandTimedOut),
        (env.execute("true", "/no/such/place"), CommandFailed),
        (running.wait(PATIENCE), CommandInterrupted),
    ]
    for result, kind in fates:
        error = raised(CommandError, result.check)
        assert type(error) is kind
        assert error.result is result
        assert "why" not in result.output or "why" in str(error)


@case
def usage_tells_time_and_memory(open: Opener) -> None:
    """CPU time and peak memory of a command are told."""
    usage = open().execute("i=0; while ((i++ < 100000)); do :; done").usage
    assert usage is not None
    assert 0.01 < usage.user_seconds < 60
    assert usage.system_seconds >= 0
    assert 1 << 20 <= usage.peak_memory_bytes < 1 << 30
