"""What a shell says of itself: real bash, then anything at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermitcrab.core import dump, quoting
from hermitcrab.core.dump import DamagedDump, NoDirectory
from hermitcrab.core.state import ShellState, Variable
from tests import raw_bash
from tests.strategies import function_names, states, text

BARE = raw_bash.fresh()
real = settings(deadline=None, max_examples=60)


def differences(one: ShellState, two: ShellState) -> dict[str, object]:
    """What differs, named, for people who read a failure."""
    found: dict[str, object] = {}
    for name in one.variables.keys() | two.variables.keys():
        if one.variables.get(name) != two.variables.get(name):
            found[name] = (one.variables.get(name), two.variables.get(name))
    for part in ("cwd", "oldpwd", "functions", "aliases", "options", "shopts", "umask"):
        if getattr(one, part) != getattr(two, part):
            found[f"<{part}>"] = (getattr(one, part), getattr(two, part))
    return found


@real
@given(states(BARE))
def test_a_state_survives_a_shell(state: ShellState) -> None:
    """state -> a shell restored to it -> its dump -> the same state."""
    if "allexport" in state.options:
        state = replace(state, options=state.options - {"allexport"})
    told, parsed = raw_bash.execute("true", state, BARE)
    assert told.output == b""
    assert differences(state, parsed.state) == {}


@real
@given(
    states(BARE),
    st.sampled_from(
        ["true", "exit 3", "set -e; false", "trap : EXIT", "set -euxv; true", "f() { local v=1; exit; }; f"]
    ),
)
def test_a_state_survives_two_shells_and_any_end(state: ShellState, command: str) -> None:
    _, first = raw_bash.execute("true", state, BARE)
    _, second = raw_bash.execute(command, first.state, BARE, first)
    left = second.state
    if "f()" in command:
        left = replace(left, functions={k: v for k, v in left.functions.items() if k != "f"})
    assert differences(first.state, left) == {}


@real
@given(st.dictionaries(st.from_regex(r"[a-z]{1,6}", fullmatch=True), text, min_size=1, max_size=6))
def test_what_bash_assigns_is_what_is_parsed(values: dict[str, str]) -> None:
    """Assignments by bash itself, of any bytes, as scalars, arrays and associative arrays."""
    lines = []
    for name, value in values.items():
        quoted = quoting.quote(value).decode()
        lines.append(f"s_{name}={quoted}; export x_{name}={quoted}; a_{name}=({quoted} '' {quoted})")
        lines.append(f"declare -A m_{name}=([k]={quoted}); test {quoted} && m_{name}[{quoted}]=v")
    _, parsed = raw_bash.execute("\n".join(lines), BARE, BARE)
    found = parsed.state.variables
    for name, value in values.items():
        assert found[f"s_{name}"] == Variable(value, "")
        assert found[f"x_{name}"] == Variable(value, "x")
        assert found[f"a_{name}"] == Variable((("0", value), ("1", ""), ("2", value)), "a")


bodies = st.lists(
    st.one_of(
        text.map(lambda value: f"printf %s {quoting.quote(value).decode()}"),
        text.map(lambda value: "printf %s '" + value.replace("'", "'\\''") + "'"),
        st.from_regex(r"[ -~]{0,20}", fullmatch=True).map(lambda line: f"cat <<'STOP'\n{line}\n}}\nSTOP"),
        st.just("if true; then echo yes; else echo no; fi"),
        st.just("for i in 1 2; do echo $i; done | cat"),
        st.just("case $1 in a|b) echo ab;; *) ;; esac"),
        st.just('x=$(cat <<E\n$1\nE\n); echo "$x"'),
        st.just("(cat <<A; cat <<B)\na\nA\nb\nB"),
        st.just("inner_one () \n{ \n    echo inner\n}; inner_one"),
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(function_names, bodies, min_size=1, max_size=4))
def test_functions_survive_and_do_the_same(functions: dict[str, list[str]]) -> None:
    define = "\n".join(f"function {name} {{\n{chr(10).join(body)}\n}}" for name, body in functions.items())
    call = "\n".join(f"\\{name} a </dev/null" for name in functions if name not in ("export", "set", "eval"))
    before, parsed = raw_bash.execute(f"{define}\n{call}", BARE, BARE)
    assert parsed.state.functions.keys() >= functions.keys()
    after, again = raw_bash.execute(call, parsed.state, BARE, parsed)
    assert after.output == before.output
    assert differences(parsed.state, again.state) == {}


def test_a_function_called_builtin_is_told_among_noise() -> None:
    """A DEBUG trap prints into the dump until it is removed; `t`, as our own function would intervene."""
    noise = "t=tr; ${t}ap 'echo noise; declare -f builtin' DEBUG"
    command = f'builtin () {{ command builtin "$@"; }}; {noise}'
    _, parsed = raw_bash.execute(command, BARE, BARE)
    assert parsed.state.functions["builtin"].body == '{ \n    command builtin "$@"\n}'


def test_a_directory_that_looks_like_a_function(tmp_path: Path) -> None:
    odd = tmp_path / "x\ndeclare -f evil\n0777\n"
    odd.mkdir()
    _, parsed = raw_bash.execute(
        f"f() {{ :; }}; umask 027; cd {quoting.quote(str(odd)).decode()}", BARE, BARE
    )
    assert (parsed.state.cwd, parsed.state.umask) == (str(odd), "0027")
    assert parsed.state.functions.keys() == {"f"}


@pytest.mark.parametrize("end", ["true", "exit", "f() { exit; }; f"])
def test_aliases_are_told_as_they_are_at_the_end(end: str) -> None:
    _, first = raw_bash.execute(
        f"alias a=1 b=2; : ${{BASH_ALIASES[a]}}; unalias a; alias c=3; {end}", BARE, BARE
    )
    assert first.state.aliases == {"b": "2", "c": "3"}
    _, second = raw_bash.execute(f"unalias b; {end}", first.state, BARE, first)
    assert second.state.aliases == {"c": "3"}


WHOLE = raw_bash.execute(
    "a=1; list=(x 'y z'); declare -A m=([k]=v); f() { echo f; }; export -f f; alias l=ls; declare -n r=a",
    BARE,
    BARE,
)[0].dump


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400))
def test_garbage_is_damaged_and_nothing_else(data: bytes) -> None:
    for garbage in (data, b"\0state1\0" + data, b"\0nocd\0" + data, WHOLE[:40] + data + b"\0end\0"):
        try:
            raw_bash.parse(garbage)
        except (DamagedDump, NoDirectory):
            continue


@settings(deadline=None, max_examples=300)
@given(st.integers(0, len(WHOLE)), st.binary(max_size=12), st.integers(0, 12))
def test_a_dump_changed_anywhere_is_parsed_or_damaged(at: int, replacement: bytes, removed: int) -> None:
    try:
        raw_bash.parse(WHOLE[:at] + replacement + WHOLE[at + removed :])
    except (DamagedDump, NoDirectory):
        return


@settings(deadline=None)
@given(st.integers(0, len(WHOLE) - 5))
def test_a_dump_cut_anywhere_is_damaged(at: int) -> None:
    with pytest.raises(DamagedDump):
        raw_bash.parse(WHOLE[:at])


def test_a_whole_dump_is_parsed() -> None:
    state = raw_bash.parse(WHOLE).state
    assert state.variables["list"] == Variable((("0", "x"), ("1", "y z")), "a")
    assert state.variables["r"] == Variable("a", "n")
    assert state.functions["f"].attributes == "x"
    assert state.aliases == {"l": "ls"}


def test_an_unchanged_dump_gives_the_very_same_state() -> None:
    first = raw_bash.parse(WHOLE)
    assert raw_bash.parse(WHOLE, first).state is first.state


@pytest.mark.parametrize(
    "line",
    [
        b'declare -- evil="$(touch /tmp/evil)"\n',
        b"declare -n evil='x[$(touch /tmp/evil)]'\n",
        b'declare -a evil=([$(id)]="1")\n',
        b"declare -x evil=`id`\n",
        b"touch /tmp/evil\n",
    ],
)
def test_a_hostile_line_is_text_or_damage(line: bytes) -> None:
    """Nothing in a dump is ever run; what is not a plain value is a value, dropped, or damage."""
    try:
        state = raw_bash.parse(WHOLE.replace(b'declare -- a="1"\n', line)).state
    except DamagedDump:
        return
    evil = state.variables.get("evil")
    if evil is not None:
        told, _ = raw_bash.execute("declare -p evil", state, BARE)
        assert b"uid=" not in told.output


@given(st.binary(max_size=30))
def test_unquoting_never_fails(data: bytes) -> None:
    for word in (b'"' + data + b'"', b"$'" + data + b"'", b"'" + data + b"'", data):
        assert isinstance(dump.unquote(word), bytes)
