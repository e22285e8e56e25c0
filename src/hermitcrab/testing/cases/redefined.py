"""Users define functions and aliases of any name, those of bash's own commands included."""

from __future__ import annotations

from hermitcrab.testing.inside import say, value
from hermitcrab.testing.suite import Opener, case, each

NAMES = [
    "builtin",
    "exec",
    "exit",
    "printf",
    "pwd",
    "trap",
    "declare",
    "cd",
    "eval",
    "read",
    "unset",
    "test",
    "set",
    "local",
    "return",
    "shopt",
    "alias",
    "unalias",
    "mapfile",
    "umask",
    "compgen",
    "command",
    "type",
    "source",
    "export",
    "kill",
    "true",
    "false",
    "echo",
    "[",
    ":",
    ".",
]
KEYWORDS = [
    "if",
    "then",
    "fi",
    "while",
    "do",
    "done",
    "case",
    "esac",
    "until",
    "for",
    "{",
    "}",
    "!",
    "time",
    "function",
]
# A program, because everything that is built in may have been redefined.
_SHOW = '/usr/bin/env echo "$kept"'


@each(NAMES)
def a_function_named_like_a_builtin_does_no_harm(open: Opener, name: str) -> None:
    """A function of a builtin's name changes what the user calls, not what the session remembers."""
    env = open()
    say(env, "\\builtin cd /usr; kept=0")
    env.execute(f"kept=1; function {name} {{ /usr/bin/env echo mine; }}")
    assert value(env, "kept") == "1"
    assert name in env.state.functions
    assert env.execute(f"{name} x; kept=2").output == "mine\n"
    assert value(env, "kept") == "2"
    assert env.execute(_SHOW).output == "2\n"
    assert env.cwd == "/usr"
    assert name in env.state.functions


@each([*NAMES, *KEYWORDS])
def an_alias_named_like_a_builtin_does_no_harm(open: Opener, name: str) -> None:
    """An alias of a builtin's name, or of a keyword's, changes what the user writes and nothing else."""
    env = open()
    env.execute(f"kept=1; \\alias '{name}=/usr/bin/env echo mine'")
    assert (value(env, "kept"), name in env.state.aliases) == ("1", True)
    assert env.execute(f"kept=2\n{name} x").output == "mine x\n"
    assert value(env, "kept") == "2"
    assert env.execute(_SHOW).output == "2\n"
    assert env.cwd == say(open(), "pwd -P") or env.cwd.startswith("/")


@case
def all_builtins_redefined_as_functions_do_no_harm(open: Opener) -> None:
    """Functions of all these names together still leave a session that remembers."""
    env = open()
    say(env, "cd /usr")
    env.execute("kept=1; " + "; ".join(f"function {name} {{ /usr/bin/env echo mine; }}" for name in NAMES))
    assert value(env, "kept") == "1"
    for count in ("2", "3"):
        env.execute(f"kept={count}")
        assert value(env, "kept") == count
        assert env.execute(_SHOW).output == f"{count}\n"
    assert env.cwd == "/usr"
    assert set(NAMES) <= env.state.functions.keys()


@case
def all_builtins_redefined_as_aliases_do_no_harm(open: Opener) -> None:
    """Aliases of all these names together still leave a session that remembers."""
    env = open()
    words = " ".join(f"'{name}=/usr/bin/env echo mine'" for name in [*NAMES, *KEYWORDS])
    env.execute(f"\\cd /usr; kept=1; \\alias {words}")
    assert value(env, "kept") == "1"
    for count in ("2", "3"):
        env.execute(f"kept={count}")
        assert value(env, "kept") == count
    assert env.execute(_SHOW).output == "3\n"
    assert env.cwd == "/usr"


@case
def builtins_redefined_and_then_exit(open: Opener) -> None:
    """In the very command that redefines everything, `exit` still gives its status and the state."""
    env = open()
    others = [name for name in NAMES if name != "exit"]
    result = env.execute("kept=1; " + "; ".join(f"function {name} {{ :; }}" for name in others) + "\nexit 7")
    assert (result.output, result.returncode) == ("", 7)
    assert value(env, "kept") == "1"


@case
def a_function_named_exit_can_still_exit(open: Opener) -> None:
    """The usual wrapper around `exit` works, also in later commands."""
    env = open()
    result = env.execute("exit() { echo leaving; builtin exit 7; }; kept=1; exit")
    assert (result.output, result.returncode) == ("leaving\n", 7)
    result = env.execute("echo $kept; exit")
    assert (result.output, result.returncode) == ("1\nleaving\n", 7)


@case
def a_function_named_cd_is_the_users(open: Opener) -> None:
    """The usual wrapper around `cd` works, and the directory is remembered."""
    env = open()
    say(env, 'cd() { builtin cd "$@" && echo "now in $PWD"; }')
    assert say(env, "cd /usr") == "now in /usr"
    assert say(env, "pwd", cwd="/") == "/"


@case
def readonly_and_traced_functions_do_no_harm(open: Opener) -> None:
    """`readonly -f` and `declare -ft` are remembered and stand in nobody's way."""
    env = open()
    say(env, "fixed() { echo fixed; }; readonly -f fixed; traced() { echo traced; }; declare -ft traced")
    say(env, "other() { echo other; }")
    assert say(env, "fixed; traced; other") == "fixed\ntraced\nother"
    assert env.execute("fixed() { echo changed; }; true").output.count("readonly") == 1
    assert say(env, "fixed") == "fixed"
