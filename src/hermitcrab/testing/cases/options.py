"""Options of the shell: which are remembered and which never are."""

from __future__ import annotations

from hermitcrab.testing.inside import say, value, works
from hermitcrab.testing.suite import Opener, case, each

CARRIED = [
    "allexport",
    "braceexpand",
    "errtrace",
    "functrace",
    "hashall",
    "histexpand",
    "ignoreeof",
    "interactive-comments",
    "keyword",
    "monitor",
    "noclobber",
    "noglob",
    "nolog",
    "notify",
    "physical",
    "pipefail",
    "posix",
    "vi",
    "emacs",
]


@each(CARRIED)
def a_set_option_is_remembered(open: Opener, name: str) -> None:
    """`set -o` and `set +o` hold in later commands."""
    env = open()
    before = say(env, f"shopt -po {name}; true")
    after = before.replace("+o", "-o") if "+o" in before else before.replace("-o", "+o")
    say(env, after)
    works(env)
    assert say(env, f"shopt -po {name}; true") == after
    say(env, f"kept=1; {before}")
    assert say(env, f"echo $kept; shopt -po {name}; true") == f"1\n{before}"


@case
def a_shopt_is_remembered(open: Opener) -> None:
    """Each `shopt` that can be changed is remembered, and none of them disturbs what follows."""
    env = open()
    lines = [line.split() for line in say(env, "shopt -p; true").splitlines()]
    fixed = {"login_shell", "restricted_shell"}
    for _, flag, name in lines:
        if name in fixed or name.startswith("compat"):
            continue
        other = "-u" if flag == "-s" else "-s"
        say(env, f"shopt {other} {name}")
        assert say(env, f"kept={name}; shopt -p {name}; true") == f"shopt {other} {name}", name
        assert value(env, "kept") == name
        say(env, f"shopt {flag} {name}")
    assert say(env, "shopt -p; true") == "\n".join(map(" ".join, lines))


@case
def several_options_at_once_are_remembered(open: Opener) -> None:
    """Options of both kinds, set together, are all there later."""
    env = open()
    say(env, "set -o pipefail -o noclobber -f; shopt -s nullglob globstar dotglob nocasematch; set +B")
    assert (
        say(env, "echo {1,2} *; [[ a == A ]] && echo same; false | true || echo pipe")
        == "{1,2} *\nsame\npipe"
    )
    assert say(env, "shopt -p nullglob globstar dotglob nocasematch | grep -c -- -s") == "4"


@each(list("euxvnt"))
def a_dangerous_option_is_never_carried(open: Opener, letter: str) -> None:
    """None of `-e -u -x -v -n -t` outlives its command."""
    env = open()
    env.execute(f"marked=1; set -{letter}")
    result = env.execute("false; echo ${nothing_here}next; echo line; kept=2")
    assert (result.output, result.returncode) == ("next\nline\n", 0)
    assert say(env, "echo $-").find(letter) < 0
    assert value(env, "kept") == "2"


@case
def all_dangerous_options_at_once_are_never_carried(open: Opener) -> None:
    """`set -euxv` in one command leaves the next one as it was, however the first one ends."""
    env = open()
    plain = say(env, "echo $-")
    for end in ("true", "false", "exit 3", "echo $nothing_here", "cd /nonexistent"):
        env.execute(f"set -euxv\n{end}")
        assert say(env, "echo $-") == plain
    assert not env.state.options & {"errexit", "nounset", "xtrace", "verbose", "noexec", "onecmd"}


@case
def aliases_expand_from_the_start(open: Opener) -> None:
    """`expand_aliases` is on in a new session, as at a prompt; who switches it off has it off."""
    env = open()
    assert say(env, "shopt -q expand_aliases && echo on") == "on"
    say(env, "alias hi='echo alias'; hi() { echo function; }; shopt -u expand_aliases")
    assert say(env, "hi") == "function"
    say(env, "shopt -s expand_aliases")
    assert say(env, "hi") == "alias"


@case
def no_glob_and_allexport_do_not_touch_our_own_text(open: Opener) -> None:
    """Under `set -f -a -C -P` and `failglob` everything else is still remembered."""
    env = open()
    say(env, "set -f -a -C -P; shopt -s failglob; cd /usr")
    say(env, "auto=1; declare -A map=([*]=x)")
    assert say(env, "env | grep -c ^auto=; echo ${map['*']}; pwd") == "1\nx\n/usr"
    assert not [name for name in env.state.environ if name.startswith("__")]
