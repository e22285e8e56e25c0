"""The session as a value: saved, compared, given to another environment; and what must not be in it."""

from __future__ import annotations

import json
import operator
from functools import partial

from hermitcrab.core.state import ShellState
from hermitcrab.errors import CommandError, ConfigError
from hermitcrab.testing.inside import host_processes, needs_proc, raised, read_until, say, value, works
from hermitcrab.testing.suite import Opener, case

RICH = (
    "cd /usr; v='a b\n\\'; export e=é; list=(1 'two 2'); declare -A map=([k k]=v); declare -i n=4; "
    "readonly r=1; f() { cat <<E\nf $1\nE\n}; alias al='echo al'; set -o pipefail; "
    "shopt -s nullglob; umask 027; printf -v raw '\\xff\\x01'"
)
ASK = (
    'echo "$v|$e|${list[1]}|${map[k k]}|$r"; f 1; al; n+=1; echo $n; umask; shopt -p nullglob; '
    'printf %s "$raw" | od -An -tx1'
)


@case
def a_session_survives_as_json(open: Opener) -> None:
    """The state can be saved as JSON, loaded, and given to a new environment, which goes on from there."""
    env = open()
    say(env, RICH)
    expected = say(env, ASK)
    say(env, "n=4")
    text = env.state.to_json()
    env.cleanup()
    json.loads(text)
    loaded = ShellState.from_json(text)
    assert loaded == env.state
    second = open(state=loaded, keep_code=True)
    assert say(second, ASK) == expected
    assert second.cwd == "/usr"
    assert "pipefail" in second.state.options


@case
def the_state_is_a_value(open: Opener) -> None:
    """The state of an unchanged session is equal, of a changed one is not, and cannot be written to."""
    env = open()
    first = env.state
    works(env)
    assert env.state == first
    say(env, "v=1")
    second = env.state
    assert second != first
    assert "v" not in first.variables
    raised(TypeError, lambda: operator.setitem(second.variables, "v", "2"))  # type: ignore[call-overload]
    say(env, "unset v")
    assert env.state == first


@case
def a_command_that_changes_nothing_leaves_an_equal_state(open: Opener) -> None:
    """However rich a session is, a command that changes nothing leaves it equal to what it was."""
    env = open()
    say(env, RICH)
    say(
        env, "declare -A many; for i in {1..300}; do many[key $i]=$i; done; many[' ']=1; many[';']=2; unset i"
    )
    before = env.state
    for command in ("true", "exit 3", "set -eux; false", "f 1 >/dev/null"):
        env.execute(command)
        changed = [
            name for name in before.variables if env.state.variables.get(name) != before.variables[name]
        ]
        assert not changed
        assert env.state == before


@case
def one_state_can_begin_many_sessions(open: Opener) -> None:
    """Two environments that begin with the same state go their own ways."""
    env = open()
    say(env, "v=1; cd /usr")
    state = env.state
    one, two = open(state=state), open(state=state)
    say(one, "v=2; cd /")
    assert say(two, "echo $v; pwd") == "1\n/usr"
    assert (value(env, "v"), env.cwd) == ("1", "/usr")


@case
def a_damaged_saved_state_is_refused(open: Opener) -> None:
    """What is no saved state is a ConfigError that says so."""
    text = open().state.to_json()
    for damaged in (
        "",
        "{}",
        "[]",
        "null",
        text[:-10],
        text.replace('"version": 1', '"version": 99'),
        '{"version": 1}',
    ):
        raised(ConfigError, partial(ShellState.from_json, damaged))


@case
def given_variables_win_over_a_given_state(open: Opener) -> None:
    """`env=` on top of `state=` is what the session has."""
    env = open()
    say(env, "export chosen=old kept=1")
    second = open(state=env.state, env={"chosen": "new"})
    assert say(second, "echo $chosen $kept; env | grep -c -e ^chosen=new -e ^kept=1") == "new 1\n2"


@case
def a_given_value_is_in_no_process_list(open: Opener) -> None:
    """A secret passed as `env=` is in no process's arguments, in the sandbox or on this machine."""
    secret = "hunter2-" + "s3cr3t"
    env = open(env={"TOKEN": secret})
    needs_proc(env)
    process = env.start("echo up; cat")
    read_until(process, "up\n")
    inside = say(env, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '")
    assert secret not in inside
    assert not [line for line in host_processes().values() if secret in line]
    assert say(env, 'echo "$TOKEN"') == secret
    process.close_stdin()


@case
def a_given_value_is_in_no_error_and_no_name(open: Opener) -> None:
    """A secret passed as `env=` is not in the way an environment shows itself."""
    secret = "hunter2-" + "s3cr3t"
    env = open(env={"TOKEN": secret})
    assert secret not in repr(env) + str(vars(env)) + env.sandbox_id
    assert secret not in str(raised(CommandError, env.execute("exit 3").check))


@case
def no_other_command_finds_the_state_in_a_file(open: Opener) -> None:
    """The state passes through no file that another process of the sandbox could read."""
    env = open()
    say(env, "private=the-value-of-this-variable; touch /tmp/.crab-before 2>/dev/null; true")
    works(env)
    found = say(
        env,
        "find /tmp /dev/shm /var/tmp -maxdepth 3 -type f -name '*hermit*' "
        "-exec grep -lsI the-value-of-this-variable {} + 2>/dev/null; true",
    )
    assert found == ""
