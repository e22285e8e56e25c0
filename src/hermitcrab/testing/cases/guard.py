"""The guard: what it refuses is not run."""

from __future__ import annotations

from functools import partial

from hermitcrab.errors import CommandRefused
from hermitcrab.testing.inside import raised, say, scratch, works
from hermitcrab.testing.suite import Opener, case


@case
def a_refused_command_does_not_even_begin(open: Opener) -> None:
    """A catastrophe is refused with the name of its rule, before anything of the command ran."""
    env = open(guard=True, guard_deny=["touch forbidden"])
    scratch(env)
    for command, rule in (
        ("touch made; rm -rf /", "wipe"),
        ("touch made; r=reboot; if true; then $r; fi", "power"),
        ("touch made; echo forbidden | xargs touch", "deny: touch forbidden"),
    ):
        assert env.would_refuse(command) == rule
        for start in (env.execute, env.stream, env.start):
            error = raised(CommandRefused, partial(start, command))
            assert error.rule == rule
    assert say(env, "ls -A; echo 'rm -rf /' reboot") == "rm -rf / reboot"
    works(env)


@case
def the_guard_knows_the_session(open: Opener) -> None:
    """Variables and the directory of the session count, and would_refuse runs nothing."""
    env = open(guard=True)
    home = say(env, "cd ~; pwd")
    assert env.would_refuse("rm -rf *") == "wipe"
    assert env.would_refuse("rm -rf *", "/tmp/somewhere") is None
    say(env, "victim=$PWD; cd /tmp")
    assert env.would_refuse('rm -rf "$victim"') == "wipe"
    assert env.would_refuse('victim=./x; rm -rf "$victim"') is None
    assert say(env, f"test -d {home} && echo there") == "there"
