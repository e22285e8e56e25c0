"""What a command leaves running in the sandbox."""

from __future__ import annotations

import time

from hermitcrab.testing.inside import PATIENCE, alive, pids_in, say, scratch, works
from hermitcrab.testing.suite import Opener, case, each

WAYS = {
    "plain": "sleep 600 &",
    "nohup": "nohup sleep 600 >/dev/null 2>&1 &",
    "setsid": "setsid sleep 600 &",
    "disown": "sleep 600 & disown",
    "holds_the_output": "(sleep 600; echo late) &",
    "subshell": "(sleep 600 & echo $!); true",
    "a_job_of_monitor_mode": "set -m; sleep 600 &",
    "then_exit": "sleep 600 & trap 'echo bye' EXIT; echo $!; exit 0",
}


@each(WAYS)
def a_background_process_lives_on(open: Opener, command: str) -> None:
    """A command is over when its shell is: what it left in the background runs on."""
    env = open()
    started = time.monotonic()
    result = env.execute(f"{command}\necho $!", timeout=PATIENCE)
    assert time.monotonic() - started < PATIENCE / 2
    assert result.returncode == 0
    pid = pids_in(result.output)[0]
    works(env)
    assert alive(env, pid) == [pid]
    say(env, f"kill {pid}")


@case
def a_server_answers_in_later_commands(open: Opener) -> None:
    """A server that one command started serves the next ones."""
    env = open()
    scratch(env)
    say(env, 'mkfifo ask answer; while read -r line <ask; do echo "you said $line" >answer; done &')
    for word in ("one", "two"):
        assert say(env, f"echo {word} >ask; cat answer") == f"you said {word}"


@case
def output_after_the_shells_end_does_not_kill(open: Opener) -> None:
    """A background process may print for ever: nobody reads it, and it is not ended for it."""
    env = open()
    scratch(env)
    command = (
        "mkfifo go done; (read -r x <go; seq 300000; seq 300000 >&2; echo $? >done; sleep 600) & echo $!"
    )
    pid = pids_in(say(env, command))[0]
    assert say(env, "echo >go; cat done") == "0"
    assert alive(env, pid) == [pid]


@case
def late_output_is_not_the_next_commands(open: Opener) -> None:
    """What a background process prints later appears in no other command's output."""
    env = open()
    scratch(env)
    say(env, "mkfifo go done; (read -r x <go; echo late; echo late >&2; echo >done) &")
    assert env.execute("echo >go; cat done >/dev/null; echo mine").output == "mine\n"
    works(env)


@case
def a_background_process_survives_a_later_timeout(open: Opener) -> None:
    """A time-out ends what its own command started and nothing else."""
    env = open(kill_grace=0.1)
    pid = pids_in(say(env, "setsid sleep 600 & sleep 601 & echo $!"))[0]
    assert env.execute("sleep 602", timeout=0.2).returncode == 124
    assert alive(env, pid) == [pid]
    assert env.execute("sleep 602 & disown; echo $!; sleep 603", timeout=0.2).returncode == 124
    assert alive(env, pid) == [pid]


@case
def a_background_process_does_not_hold_the_state(open: Opener) -> None:
    """The state is known when the shell ends, although a child still holds all of its files."""
    env = open()
    say(env, "cd /usr; kept=1; (sleep 600) &")
    assert say(env, "echo $kept; pwd") == "1\n/usr"


@case
def many_background_processes_live_on(open: Opener) -> None:
    """Twenty commands that each leave a process leave twenty."""
    env = open()
    pids = [pids_in(say(env, f"sleep {600 + number} & echo $!"))[0] for number in range(20)]
    assert alive(env, *pids) == pids
