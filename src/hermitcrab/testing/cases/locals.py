"""`exit` inside a function: what was local to it is not the session's."""

from __future__ import annotations

from hermitcrab.testing.inside import attributes, say, value, works
from hermitcrab.testing.suite import Opener, case, each

BEFORE = "v=outer; export e=outer; list=(o u t); declare -A map=([o]=1); declare -i n=5; other=target"
LOCALS = {
    "plain": "local v=inner",
    "unset": "local v",
    "array": "local -a v=(i n)",
    "associative": "local -A v=([i]=n)",
    "integer": "local -i v=7",
    "lower_case": "local -l v=INNER",
    "exported": "local -x v=inner",
    "readonly": "local -r v=inner",
    "reference": "local -n v=other",
    "inherited": "local -I v; v=inner",
    "declare": "declare v=inner",
    "typeset": "typeset v=inner",
    "same_value": "local v=outer",
    "unset_afterwards": "local v=inner; unset v",
    "loop_variable": "local v; for v in a b; do :; done",
}


@each(LOCALS)
def a_local_does_not_replace_a_variable(open: Opener, declaration: str) -> None:
    """A local that hides a variable of the session's is gone when its function calls `exit`."""
    env = open()
    say(env, BEFORE)
    result = env.execute(f"f() {{ {declaration}; exit 3; }}; f")
    assert result.returncode == 3
    assert value(env, "v") == "outer"
    assert attributes(env, "v") == set()
    assert value(env, "other") == "target"
    assert say(env, "echo $v") == "outer"


@each(LOCALS)
def a_local_does_not_become_a_variable(open: Opener, declaration: str) -> None:
    """A local that hides nothing leaves nothing behind."""
    env = open()
    result = env.execute(f"f() {{ {declaration}; exit 3; }}; f")
    assert result.returncode == 3
    assert "v" not in env.state.variables
    assert say(env, "echo ${v-none}") == "none"


@each(LOCALS)
def a_local_does_not_replace_what_the_same_command_set(open: Opener, declaration: str) -> None:
    """A local that hides a variable of the same command gives way to it."""
    env = open()
    env.execute(f"{BEFORE}; f() {{ {declaration}; exit 3; }}; f")
    assert value(env, "v") == "outer"
    assert value(env, "other") == "target"


@case
def nested_locals_do_not_leak(open: Opener) -> None:
    """However many functions deep, only the session's own value is left."""
    env = open()
    say(env, BEFORE)
    env.execute("a() { local v=1 w=1; b; }; b() { local v=2 x=2; c; }; c() { local v=3 w=3; exit; }; a")
    assert value(env, "v") == "outer"
    assert not {"w", "x"} & env.state.variables.keys()


@case
def deep_recursion_does_not_leak(open: Opener) -> None:
    """A hundred frames of the same local still give way to the session's value."""
    env = open()
    say(env, BEFORE)
    env.execute("f() { local v=$1; (( $1 == 0 )) && exit 3; f $(($1 - 1)); }; f 100")
    assert value(env, "v") == "outer"


@case
def local_arrays_do_not_replace_arrays(open: Opener) -> None:
    """Arrays, hidden by locals of any kind, come back whole."""
    env = open()
    say(env, BEFORE)
    env.execute("f() { local list=x; local -a map=(1 2); local -A n=([k]=v); local e=in; exit; }; f")
    assert say(env, 'echo "${list[*]} ${map[o]} $((n + 1)); $(env | grep ^e=)"') == "o u t 1 6; e=outer"
    assert attributes(env, "map") == {"A"}
    assert attributes(env, "n") == {"i"}


@each(
    [
        "IFS=,",
        "PATH=/nowhere",
        "HOME=/nowhere",
        "LC_ALL=C",
        "TMOUT=1",
        "POSIXLY_CORRECT=1",
        "PWD=/nowhere",
        "_=x",
    ]
)
def a_local_of_bashs_own_does_not_leak(open: Opener, assignment: str) -> None:
    """Locals that bash goes by (IFS, PATH and the like) do not become the session's."""
    name = assignment.partition("=")[0]
    env = open()
    say(env, "cd /usr")
    before = say(env, f'echo "${{{name}-none}}"') if name != "_" else ""
    env.execute(f"kept=1; f() {{ local {assignment}; exit 3; }}; f")
    works(env)
    assert value(env, "kept") == "1"
    assert env.cwd == "/usr"
    if name != "_":
        assert say(env, f'echo "${{{name}-none}}"') == before


@case
def what_a_function_changes_globally_is_kept(open: Opener) -> None:
    """Globals that a function sets before it exits are remembered, beside its locals."""
    env = open()
    say(env, "a=1; readonly fixed=f; declare -n link=a")
    env.execute(
        "f() { local v=1; a=2; new=3; declare -g more=4; export shown=5; list=(x y); unset v; "
        "cd /usr; exit; }; f"
    )
    assert say(env, "echo $a $new $more $shown ${list[1]} $fixed $link; pwd") == "2 3 4 5 y f 2\n/usr"


@case
def a_readonly_global_made_in_a_function_is_kept(open: Opener) -> None:
    """`readonly` inside a function makes a global one, which is remembered although the function exits."""
    env = open()
    env.execute("f() { readonly fixed=1; declare -gr also=2; declare -gn link=fixed; exit; }; f")
    assert (value(env, "fixed"), value(env, "also"), value(env, "link")) == ("1", "2", "fixed")


@case
def locals_under_set_e_do_not_leak(open: Opener) -> None:
    """A failure under `set -e` inside a function is no different from `exit`."""
    env = open()
    say(env, BEFORE)
    env.execute("set -eu; f() { local v=inner w=1; false; }; f")
    assert (value(env, "v"), "w" in env.state.variables) == ("outer", False)
    env.execute("set -u; f() { local v=inner w=1; echo $nothing_here; }; f")
    assert (value(env, "v"), "w" in env.state.variables) == ("outer", False)


@case
def locals_with_an_exit_trap_do_not_leak(open: Opener) -> None:
    """Nor does the user's own EXIT trap, which still sees the function's locals, let them out."""
    env = open()
    say(env, BEFORE)
    result = env.execute("trap 'echo $v' EXIT; f() { local v=inner; exit 3; }; f")
    assert result.returncode == 3
    assert value(env, "v") == "outer"


@case
def temporary_assignments_do_not_leak(open: Opener) -> None:
    """`v=x command` is that command's alone, also when it is a function that exits."""
    env = open()
    say(env, BEFORE)
    env.execute("f() { exit 3; }; v=temporary w=temporary f")
    assert (value(env, "v"), "w" in env.state.variables) == ("outer", False)
    env.execute("v=temporary eval 'exit 3'")
    assert value(env, "v") == "outer"


@case
def local_options_do_not_leak(open: Opener) -> None:
    """`local -` keeps options to its function, also when that function exits."""
    env = open()
    env.execute("f() { local -; set -o noglob; exit 3; }; f")
    works(env)
    assert say(env, "[[ -o noglob ]] || echo off") == "off"
