"""Time limits and interrupts."""

from __future__ import annotations

import math
import time
from typing import Any

from hermitcrab.result import INTERRUPTED, TIMED_OUT, Outcome
from hermitcrab.testing.inside import (
    PATIENCE,
    alive,
    meanwhile,
    pids_in,
    raised,
    read_until,
    say,
    scratch,
    value,
    works,
)
from hermitcrab.testing.suite import Opener, case, each


@case
def a_timeout_answers_124_with_what_was_printed(open: Opener) -> None:
    """At its limit a command is ended: 124, the output so far, and a last line that says so."""
    env = open()
    result = env.execute("echo before; sleep 600; echo after", timeout=0.5)
    assert (result.returncode, result.outcome) == (TIMED_OUT, Outcome.TIMED_OUT)
    assert result.output == "before\n[Command timed out after 0.5s]\n"
    assert 0.4 < result.duration < PATIENCE
    works(env)


@case
def a_timeout_says_so_on_a_line_of_its_own(open: Opener) -> None:
    """The last line is its own, also after output that ends in the middle of one."""
    env = open()
    assert (
        env.execute("printf partial; sleep 600", timeout=0.3).output
        == "partial\n[Command timed out after 0.3s]\n"
    )
    result = env.execute("echo out; echo err >&2; sleep 600", timeout=0.3, separate=True)
    assert (result.stdout, result.stderr) == ("out\n", "err\n[Command timed out after 0.3s]\n")


@each({"fraction": 0.25, "whole": 1, "small": 0.05})
def a_limit_may_be_a_fraction(open: Opener, limit: float) -> None:
    """Limits are seconds, whole or not, and are kept."""
    env = open(kill_grace=0.1)
    started = time.monotonic()
    result = env.execute("sleep 600", timeout=limit)
    assert limit * 0.9 <= time.monotonic() - started < limit + 5
    assert result.output == f"[Command timed out after {limit:g}s]\n"


@each(
    {
        "0": 0,
        "negative": -1,
        "negative_fraction": -0.5,
        "nan": math.nan,
        "infinity": math.inf,
        "text": "5",
        "true": True,
    }
)
def a_limit_that_is_none_is_refused(open: Opener, limit: Any) -> None:
    """0, negative numbers and what is no number are errors, and nothing is run."""
    env = open()
    base = scratch(env)
    raised((ValueError, TypeError), lambda: env.execute(f"touch {base}/ran", timeout=limit))
    assert say(env, "ls") == ""


@case
def a_command_within_its_limit_is_left_alone(open: Opener) -> None:
    """A limit that is not reached changes nothing, then or later."""
    env = open()
    result = env.execute("sleep 0.1; echo done", timeout=PATIENCE)
    assert (result.output, result.returncode, result.outcome) == ("done\n", 0, Outcome.COMPLETED)
    left = pids_in(env.execute("sleep 600 & echo $!", timeout=0.3).output)
    say(env, "sleep 0.5")
    assert alive(env, *left) == left


@case
def a_sessions_own_limit_holds_for_every_command(open: Opener) -> None:
    """`timeout=` of the environment is the default of each command, which may say otherwise."""
    env = open(timeout=0.3, kill_grace=0.1)
    assert env.execute("sleep 600").returncode == TIMED_OUT
    assert env.execute("sleep 0.5", timeout=PATIENCE).returncode == 0


@case
def a_command_that_catches_term_may_say_goodbye(open: Opener) -> None:
    """TERM comes first: a command that cleans up is heard."""
    env = open(kill_grace=5)
    command = "trap 'echo cleaning; exit 0' TERM; echo ready; while :; do sleep 600 & wait $!; done"
    running = env.stream(command)
    seen = read_until(running, "ready")
    started = time.monotonic()
    running.interrupt()
    result = running.wait(PATIENCE)
    assert time.monotonic() - started < 4, "it waited for the whole grace"
    assert "cleaning" in result.output, seen
    assert result.returncode == INTERRUPTED


@case
def a_timed_out_command_leaves_the_state_whole(open: Opener) -> None:
    """What a timed-out command changed is remembered as a whole or not at all."""
    env = open(kill_grace=0.2)
    say(env, "a=1; z=1; cd /usr")
    env.execute("a=2; z=2; cd /; sleep 600", timeout=0.3)
    assert value(env, "a") == value(env, "z")
    assert env.cwd == ("/usr" if value(env, "a") == "1" else "/")
    works(env)


@case
def an_interrupt_from_another_thread_answers_130(open: Opener) -> None:
    """`interrupt()` ends what others wait for: 130, the output so far, and a last line that says so."""
    env = open()
    scratch(env)
    say(env, "mkfifo ready")
    with meanwhile(env, "echo before; echo >ready; sleep 600") as future:
        say(env, "cat ready")
        assert env.interrupt() == 1
        result = future.result(PATIENCE)
    assert (result.returncode, result.outcome) == (INTERRUPTED, Outcome.INTERRUPTED)
    assert result.output == "before\n[Command interrupted]\n"
    works(env)


@case
def an_interrupt_when_nothing_runs_is_nothing(open: Opener) -> None:
    """`interrupt()` with no command under way ends none, now or later."""
    env = open()
    assert env.interrupt() == 0
    works(env)


@case
def an_interrupt_spares_the_background(open: Opener) -> None:
    """Long-lived processes that were started to be held on to are not interrupted."""
    env = open()
    scratch(env)
    held = env.start("echo up; until [ -e go ]; do sleep 0.02; done")
    read_until(held, "up")
    assert env.interrupt() == 0
    assert held.running
    say(env, "touch go")
    assert held.wait(PATIENCE).returncode == 0


@case
def a_stopped_command_is_ended_at_its_limit(open: Opener) -> None:
    """A command that stopped itself or its children is ended like any other."""
    env = open(kill_grace=0.2)
    result = env.execute("echo before; sleep 600 & kill -STOP $! $$", timeout=0.4)
    assert result.returncode == TIMED_OUT
    works(env)
