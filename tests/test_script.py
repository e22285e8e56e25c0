"""Text for bash, read by real bash."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermitcrab.core import farewell, quoting, script
from hermitcrab.core.state import ShellState, Variable
from tests import raw_bash
from tests.strategies import nasty, raw, text

words = st.lists(st.one_of(raw, nasty, text), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def bare() -> ShellState:
    return raw_bash.fresh()


@settings(deadline=None, max_examples=60)
@given(words, st.sampled_from(["C", "C.UTF-8"]))
def test_a_quoted_word_is_that_word(given_words: list[str], locale: str) -> None:
    line = b"printf '%s\\0' " + b" ".join(map(quoting.quote, given_words))
    done = subprocess.run(["bash", "-c", line], env={"LC_ALL": locale}, capture_output=True, check=True)
    assert done.stdout == b"".join(quoting.encode(word) + b"\0" for word in given_words)


@given(text)
def test_a_quoted_word_is_one_line_of_ascii(word: str) -> None:
    quoted = quoting.quote(word)
    assert b"\n" not in quoted
    quoted.decode("ascii")


def test_every_byte_can_be_quoted() -> None:
    everything = bytes(range(1, 256))
    done = subprocess.run(
        ["bash", "-c", b"printf %s " + quoting.quote(everything)], capture_output=True, check=True
    )
    assert done.stdout == everything


@settings(deadline=None, max_examples=40)
@given(st.one_of(raw, nasty))
def test_a_command_is_evaluated_as_it_is(bare: ShellState, argument: str) -> None:
    quoted = "'" + argument.replace("'", "'\\''") + "'"
    told, _ = raw_bash.execute(f"printf %s {quoted}", bare, bare)
    assert told.output == quoting.encode(argument)
    assert told.status == 0


@settings(deadline=None, max_examples=20)
@given(st.integers(0, 255))
def test_the_status_is_the_commands(bare: ShellState, status: int) -> None:
    for command in (f"(exit {status})", f"exit {status}", f"trap : EXIT; exit {status}"):
        assert raw_bash.execute(command, bare, bare)[0].status == status


def test_nothing_changes_when_nothing_changed(bare: ShellState) -> None:
    assert script.changes(bare, bare) == b""
    _, parsed = raw_bash.execute("true", bare, bare)
    assert script.changes(bare, parsed.state) in (b"", script.changes(bare, parsed.state))


def test_a_readonly_variable_cannot_be_changed(bare: ShellState) -> None:
    fixed = ShellState(cwd="/", variables={**bare.variables, "r": Variable("1", "r")})
    other = ShellState(cwd="/", variables={**bare.variables, "r": Variable("2", "r")})
    assert script.changes(fixed, other) is None
    assert script.changes(fixed, bare) is None
    assert script.changes(bare, fixed) is not None


@pytest.mark.parametrize("length", [0, 1, 32767, 32768, 32769, 300_000])
def test_commands_of_any_length(bare: ShellState, length: int) -> None:
    told, parsed = raw_bash.execute(f"v={'é' * length}; printf %s $v | wc -c", bare, bare)
    assert told.output.strip() == str(2 * length).encode()
    assert parsed.state.variables["v"].value == "é" * length


def test_a_missing_directory_runs_nothing(bare: ShellState) -> None:
    gone = ShellState(cwd="/no/such/place", variables=bare.variables)
    preparation = script.prepare(gone, bare, directory=gone.cwd, injected={}, traps=False)
    told = raw_bash.run(script.bootstrap(b""), script.order(b"", preparation, gone, "echo ran"))
    assert (told.status, told.output) == (126, b"")
    assert b"nocd" in told.dump


def test_injected_values_are_exported_and_can_be_ignored(bare: ShellState) -> None:
    preparation = script.prepare(bare, bare, directory="/", injected={"TOKEN": "s3'cret"}, traps=False)
    told = raw_bash.run(script.bootstrap(b""), script.order(b"", preparation, bare, "env | grep ^TOKEN="))
    assert told.output == b"TOKEN=s3'cret\n"


def test_lines_are_counted_from_the_commands_first(bare: ShellState) -> None:
    """Though the trap's own text, of several lines, is in the same file."""
    told, _ = raw_bash.execute("echo $LINENO\necho $LINENO\nf() { echo $LINENO; }; f", bare, bare)
    assert told.output == b"1\n2\n3\n"


@pytest.mark.parametrize("end", ["true", "exit", "set -e; false", "f() { exit; }; f"])
@pytest.mark.parametrize("options", ["v", "vx", "vxu"])
def test_only_the_known_lines_are_echoed(bare: ShellState, options: str, end: str) -> None:
    told, parsed = raw_bash.execute(f"set -{options}; {end}", bare, bare)
    assert parsed.verbose
    output = told.output
    for echo in farewell.VERBOSE_ECHOES:
        output = output.removesuffix(echo)
    assert b"__hc_" not in output


def test_a_shell_starts_with_what_it_does_not_act_on(bare: ShellState) -> None:
    exported = [
        "PYTHONPATH",
        "GIT_DIR",
        "LD_PRELOAD",
        "DYLD_INSERT_LIBRARIES",
        "BASH_ENV",
        "ENV",
        "IFS",
        "PS4",
    ]
    state = ShellState(cwd="/", variables={name: Variable("x", "x") for name in exported})
    assert script.environment(state, {}).keys() == {"PYTHONPATH", "GIT_DIR"}
