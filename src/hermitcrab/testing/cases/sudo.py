"""sudo and its password, as far as a sandbox without sudo can show it: a program of that name asks."""

from __future__ import annotations

from hermitcrab.testing.inside import say, scratch, works
from hermitcrab.testing.suite import Opener, case

PASSWORD = "it's a $secret \\ word"
_ASKING = """\
#!/bin/sh
[ "$1" = -A ] || { echo "not told to ask: $*"; exit 9; }
shift
[ "$("$SUDO_ASKPASS" 'Password:')" = "$EXPECTED" ] && exec "$@"
"""


@case
def sudo_is_given_its_password_and_nobody_else(open: Opener) -> None:
    """With a password sudo is told to ask for it, and what it asks is in a place of this user's alone."""
    env = open(sudo_password=PASSWORD, env={"EXPECTED": PASSWORD})
    place = scratch(env)
    env.files.write(f"{place}/sudo", _ASKING, mode=0o700)
    say(env, f'PATH="{place}:$PATH"')
    assert (
        say(env, "echo input | sudo cat; echo $(env A=1 sudo echo two) 'sudo three'")
        == "input\ntwo sudo three"
    )
    assert say(env, "f() { if sudo true; then echo yes; fi; }; f") == "yes"
    modes = say(env, 'cd "${SUDO_ASKPASS%/*}"; find . ! -name "asked-*" -printf "%m %f\\n" | sort')
    assert modes.splitlines() == ["600 secret", "700 .", "700 askpass"]
    assert "SUDO_ASKPASS" not in env.state.variables
    works(env)
