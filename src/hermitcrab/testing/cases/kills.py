"""When a command is ended, everything that it started ends with it, and nothing else."""

from __future__ import annotations

from hermitcrab.result import INTERRUPTED, TIMED_OUT
from hermitcrab.testing.inside import (
    PATIENCE,
    alive,
    needs,
    needs_proc,
    pids_in,
    read_until,
    say,
    scratch,
    works,
)
from hermitcrab.testing.suite import Inapplicable, Opener, case, each

# Each prints the id of a process that tries to stay.
ESCAPES = {
    "child": "sleep 600 & echo $!",
    "setsid": "setsid bash -c 'echo $$; exec sleep 600' &",
    "double_fork": "(bash -c 'echo $$; exec sleep 600' &)",
    "setsid_and_double_fork": "(setsid bash -c '(bash -c \"echo \\$\\$; exec sleep 600\" &)' &)",
    "empty_environment": "env -i /bin/bash -c 'echo $$; exec sleep 600' &",
    "empty_environment_and_setsid": "(env -i setsid /bin/bash -c 'echo $$; exec /bin/sleep 600' &)",
    "nohup": "nohup bash -c 'echo $$; exec sleep 600' 2>/dev/null & sleep 0; cat nohup.out 2>/dev/null",
    "ignored_signals": "bash -c 'trap \"\" TERM INT HUP QUIT; echo $$; exec sleep 600' &",
    "disown": "sleep 600 & echo $!; disown -a",
    "closed_files": "setsid bash -c 'echo $$; exec sleep 600 <&- >&- 2>&-' &",
    "stopped": "sleep 600 & echo $!; kill -STOP $!",
    "monitor_mode": "set -m; sleep 600 & echo $!; disown",
    "answers_term_with_a_child": (
        "bash -c 'trap \"setsid sleep 600 & echo \\$!\" TERM; echo $$; while :; do sleep 1; done' &"
    ),
    "another_name": "(exec -a innocent sleep 600) & echo $!",
    "process_substitution": "exec 9> >(echo $BASHPID; trap '' TERM; sleep 600)",
    "coproc": "coproc sleep 600; echo $COPROC_PID",
}


@each(ESCAPES)
def nothing_survives_an_interrupt(open: Opener, escape: str) -> None:
    """However a process detached itself, it ends when the command that started it is ended."""
    env = open(kill_grace=0.2)
    running = env.stream(
        f'cd "$(mktemp -d)"\n{escape}\nuntil test -n "$ok"; do ok=1; done; echo ready; sleep 601'
    )
    seen = read_until(running, "ready")
    while not pids_in(seen):
        seen += read_until(running, "\n")
    running.interrupt()
    result = running.wait(PATIENCE)
    assert result.returncode == INTERRUPTED
    pids = pids_in(result.output)
    assert pids
    assert alive(env, *pids) == []
    works(env)


@case
def nothing_survives_a_timeout(open: Opener) -> None:
    """At its limit a command ends with all that it started, whatever each did to stay."""
    env = open(kill_grace=0.2)
    escapes = [
        escape for name, escape in ESCAPES.items() if name not in ("nohup", "answers_term_with_a_child")
    ]
    command = "\n".join([*escapes, "echo ready; sleep 601"])
    # So much is started that a loaded machine may need longer than the limit to print it all.
    for limit in (1.0, 4.0, 16.0):
        result = env.execute(command, timeout=limit)
        assert result.returncode == TIMED_OUT
        pids = pids_in(result.output)
        assert alive(env, *pids) == []
        if len(pids) == len(escapes):
            break
    else:
        raise AssertionError(f"only {len(pids)} of {len(escapes)} came up: {result.output}")
    works(env)


@case
def a_child_that_changed_its_user_dies_too(open: Opener) -> None:
    """A process that took another user's id ends like any other."""
    env = open(kill_grace=0.2)
    needs(env, "setpriv")
    if say(env, "id -u") != "0":
        raise Inapplicable("only root can start a process as another user")
    running = env.stream("setpriv --reuid=65534 --regid=65534 --clear-groups sleep 600 & echo $!; sleep 601")
    (pid,) = pids_in(read_until(running, "\n"))
    running.interrupt()
    assert running.wait(PATIENCE).returncode == INTERRUPTED
    assert alive(env, pid) == []
    works(env)


@case
def a_fork_chain_dies_too(open: Opener) -> None:
    """A process that keeps forking away from its killer is caught."""
    env = open(kill_grace=0, guard=False)
    base = scratch(env)
    chain = "f() { trap '' TERM; echo $BASHPID >>chain; sleep 0.01; (f &) & }"
    running = env.stream(f"{chain}; f & sleep 0.2; echo up; sleep 601", base)
    read_until(running, "up")
    running.interrupt()
    running.wait(PATIENCE)
    first, second = say(env, "wc -l <chain; sleep 0.1; wc -l <chain").split()
    assert int(first) > 1
    assert first == second, "it still forks"
    assert alive(env, *pids_in(say(env, "cat chain"))) == []
    works(env)


@case
def many_children_die_too(open: Opener) -> None:
    """Two hundred processes end as one does."""
    env = open(kill_grace=0.2)
    running = env.stream("for i in {1..200}; do setsid sleep 600 & echo $!; done; echo ready; sleep 601")
    seen = read_until(running, "ready")
    running.interrupt()
    running.wait(PATIENCE)
    pids = pids_in(seen)
    assert len(pids) == 200
    assert alive(env, *pids) == []


@case
def other_commands_processes_are_spared(open: Opener) -> None:
    """What earlier and concurrent commands started lives on, and so do they."""
    env = open(kill_grace=0.2)
    (earlier,) = pids_in(say(env, "sleep 600 & echo $!"))
    other = env.start("echo up; cat")
    read_until(other, "up")
    running = env.stream("echo ready; sleep 601")
    read_until(running, "ready")
    running.kill(grace=0)
    running.wait(PATIENCE)
    assert alive(env, earlier) == [earlier]
    assert other.running
    other.close_stdin()
    assert other.wait(PATIENCE).output == "up\n"


@case
def processes_left_by_a_finished_command_die_with_the_session_only(open: Opener) -> None:
    """Ending a command that is over reaches nothing."""
    env = open(kill_grace=0.2)
    running = env.stream("sleep 600 & echo $!")
    (pid,) = pids_in(running.wait(PATIENCE).output)
    running.kill(grace=0)
    running.interrupt()
    works(env)
    assert alive(env, pid) == [pid]


@case
def a_killed_warm_shell_harms_nobody(open: Opener) -> None:
    """A command that kills every other shell of its sandbox does not touch the commands after it."""
    env = open()
    needs_proc(env)
    say(env, "kept=1")
    for number in range(10):
        # The shells of this sandbox are the grandchildren of its agent.
        env.execute(
            "of() { for s in /proc/[0-9]*/stat; do r=$(<$s) || continue; p=${r%% *}; r=${r##*) }; "
            'set -- $1 $r; test "$3" = "$1" && echo $p; done 2>/dev/null; }; '
            "read -r _ _ _ mine _ </proc/$$/stat; "
            "read -r _ _ _ agent _ </proc/$mine/stat; "
            "for s in $(of $agent); do for p in $(of $s); do test $p = $$ || kill -9 $p; done; done "
            "2>/dev/null"
        )
        result = env.execute(f"echo here {number}")
        assert (result.output, result.returncode) == (f"here {number}\n", 0)
    assert say(env, "echo $kept") == "1"
