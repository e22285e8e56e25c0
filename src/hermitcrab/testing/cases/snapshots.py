"""A sandbox kept under an id, and others that begin where it was."""

from __future__ import annotations

from hermitcrab.backends import registry
from hermitcrab.errors import UnsupportedCapability
from hermitcrab.snapshots import forget_snapshot, list_snapshots
from hermitcrab.testing.inside import raised, say, value, works
from hermitcrab.testing.suite import Opener, case

FILL = (
    "umask 022; mkdir -p kept/empty kept/deep/er && cd kept && echo one >plain && chmod 741 plain && "
    "printf 'a\\0\\xff' >deep/bytes && ln -s ../nowhere deep/er/link && ln plain deep/other && "
    "echo odd >$'name with \\n and \\xff' && chmod 1750 deep && echo home >~/.kept && echo tmp >/tmp/kept && "
    "{ echo system >/opt/kept; } 2>/dev/null; "
    "v='two words'; export e=é; declare -A map=([a b]=c); f() { echo \"f $1\"; }; alias al='echo al'"
)
LOOK = (
    "pwd; cat plain deep/other ~/.kept /tmp/kept; od -An -tx1 deep/bytes; readlink deep/er/link; "
    "cat $'name with \\n and \\xff'; find . -printf '%m %y %P\\n' | LC_ALL=C sort; "
    'cat /opt/kept 2>/dev/null; echo "$v $e ${map[a b]}"; f 1; al'
)
RUIN = (
    "rm -r plain deep empty && echo other >plain; rm ~/.kept /tmp/kept; rm -f /opt/kept; "
    "unset -f f; unset v e map; unalias al; cd /"
)


@case
def a_snapshot_brings_files_and_session_back(open: Opener) -> None:
    """A snapshot keeps files, modes, links, empty directories and the session; else it is refused at once."""
    env = open()
    if registry.get(env.backend).snapshots is None:
        assert env.backend in str(raised(UnsupportedCapability, env.snapshot))
        works(env)
        return
    say(env, FILL)
    before = say(env, LOOK)
    id = env.snapshot("by the contract suite")
    try:
        assert say(env, LOOK) == before, "taking it changed something"
        say(env, RUIN)
        first, second = open(snapshot=id), open(snapshot=id)
        assert first.cwd == second.cwd
        assert say(first, LOOK) == before
        say(first, RUIN)
        assert say(second, LOOK) == before, "two from the same snapshot are not independent"
        assert value(env, "v") is None
        first.cleanup()
        second.cleanup()
        (known,) = [each for each in list_snapshots() if each.id == id]
        assert (known.label, known.backend) == ("by the contract suite", env.backend)
    finally:
        assert forget_snapshot(id)


@case
def a_missing_snapshot_is_a_fresh_sandbox(open: Opener) -> None:
    """A snapshot that is not there any more gives a fresh sandbox; where there are none it is refused."""
    try:
        env = open(snapshot="000000-0000000000")
    except UnsupportedCapability as error:
        refusal = str(error)
    else:
        works(env)
        assert registry.get(env.backend).snapshots is not None
        return
    assert "has no snapshots" in refusal
