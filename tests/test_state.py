"""The session as a value: saving, merging, moving."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hermitcrab.core.state import (
    PLACE_BOUND,
    Function,
    ShellState,
    Variable,
    is_loader,
    merge,
    moved_to,
    with_variables,
    without_own_name,
)
from hermitcrab.errors import ConfigError
from tests.strategies import any_state, names, variables

states = any_state(place="here", trusted=True)
BASE = ShellState(cwd="/", variables={"kept": Variable("1")})


@given(any_state())
def test_json_round_trip(state: ShellState) -> None:
    text = state.to_json()
    text.encode("ascii")
    assert ShellState.from_json(text) == state


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_that_is_no_state_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        ShellState.from_json(json.dumps(value))


@given(any_state(), st.data())
def test_a_damaged_part_is_refused_or_harmless(state: ShellState, data: st.DataObject) -> None:
    saved = json.loads(state.to_json())
    key = data.draw(st.sampled_from(sorted(saved)))
    saved[key] = data.draw(
        st.sampled_from([None, 5, "x", "\0", ["\0"], {"bad name": ["", "", ""]}, [[]], {"a": 1}])
    )
    try:
        loaded = ShellState.from_json(json.dumps(saved))
    except ConfigError:
        return
    assert ShellState.from_json(loaded.to_json()) == loaded


@given(states, states)
def test_who_changed_nothing_changes_nothing(base: ShellState, ours: ShellState) -> None:
    assert merge(base, ours, base) == ours
    assert merge(base, base, ours) == ours
    assert merge(base, ours, ours) == ours


@given(
    st.dictionaries(names, variables), st.dictionaries(names, variables), st.dictionaries(names, variables)
)
def test_disjoint_changes_are_both_kept(
    shared: dict[str, Variable], mine: dict[str, Variable], yours: dict[str, Variable]
) -> None:
    yours = {name: value for name, value in yours.items() if name not in mine and name not in shared}
    mine = {name: value for name, value in mine.items() if name not in shared}
    base = ShellState(cwd="/", variables=shared)
    one = ShellState(cwd="/one", oldpwd="/", variables=shared | mine)
    two = ShellState(cwd="/", variables=shared | yours, umask="0077")
    merged = merge(base, one, two)
    assert merged == merge(base, two, one)
    assert dict(merged.variables) == shared | mine | yours
    assert (merged.cwd, merged.umask) == ("/one", "0077")


@given(
    st.lists(st.tuples(names, variables), min_size=1, max_size=13, unique_by=lambda pair: pair[0]),
    st.randoms(),
)
def test_any_number_merge_in_any_order(changes: list[tuple[str, Variable]], random: Random) -> None:
    base = ShellState(cwd="/")
    ends = [ShellState(cwd="/", variables={name: value}) for name, value in changes]
    random.shuffle(ends)
    merged = base
    for end in ends:
        merged = merge(base, merged, end)
    assert dict(merged.variables) == dict(changes)


@given(states, states, states)
def test_a_merge_holds_nothing_of_its_own(base: ShellState, ours: ShellState, theirs: ShellState) -> None:
    merged = merge(base, ours, theirs)
    for name in (
        merged.variables.keys() | base.variables.keys() | ours.variables.keys() | theirs.variables.keys()
    ):
        before, one, two = (each.variables.get(name) for each in (base, ours, theirs))
        assert merged.variables.get(name) == (one if two == before else two)
    assert merged.options >= ours.options & theirs.options
    assert merged.options <= ours.options | theirs.options
    assert (merged.cwd, merged.oldpwd) in {(ours.cwd, ours.oldpwd), (theirs.cwd, theirs.oldpwd)}


def test_a_removal_is_merged() -> None:
    gone = ShellState(cwd="/")
    other = ShellState(cwd="/", variables={"kept": Variable("1"), "new": Variable("2")})
    assert dict(merge(BASE, other, gone).variables) == {"new": Variable("2")}
    assert dict(merge(BASE, gone, other).variables) == {"new": Variable("2")}


@settings(max_examples=50)
@given(any_state(place="there", trusted=False), any_state(place="here", trusted=True))
def test_moving_to_a_trusted_place_leaves_code_behind(state: ShellState, arrival: ShellState) -> None:
    moved = moved_to(state, arrival)
    assert moved.functions == arrival.functions
    assert moved.aliases == arrival.aliases
    assert (moved.place, moved.trusted, moved.cwd) == ("here", True, arrival.cwd)
    for name, value in moved.variables.items():
        assert value == (arrival if is_loader(name) or name in PLACE_BOUND else state).variables[name]


def test_moving_may_take_code_along() -> None:
    state = ShellState(cwd="/x", functions={"f": Function("{ :; }")}, aliases={"a": "b"}, place="there")
    arrival = ShellState(cwd="/home", place="here", trusted=True)
    assert moved_to(state, arrival, keep_code=True).functions == state.functions
    assert moved_to(state, arrival).functions == {}


def test_what_belongs_to_a_place_stays_there() -> None:
    state = ShellState(
        cwd="/x",
        place="there",
        variables={"HOME": Variable("/there", "x"), "LD_PRELOAD": Variable("evil", "x"), "v": Variable("1")},
    )
    arrival = ShellState(cwd="/home", place="here", trusted=True, variables={"HOME": Variable("/here", "x")})
    moved = moved_to(state, arrival)
    assert dict(moved.variables) == {"HOME": Variable("/here", "x"), "v": Variable("1")}


def test_going_on_in_the_same_place_keeps_everything() -> None:
    state = ShellState(cwd="/x", oldpwd="/y", place="here", variables={"HOME": Variable("/moved", "x")})
    arrival = ShellState(cwd="/home", place="here", variables={"HOME": Variable("/home", "x")})
    moved = moved_to(state, arrival)
    assert (moved.cwd, moved.oldpwd, moved.environ["HOME"]) == ("/x", "/y", "/moved")


def test_another_sandbox_of_the_same_place_has_its_own_name() -> None:
    first = ShellState(cwd="/", place="here", variables={"HOSTNAME": Variable("first")})
    second = replace(first, variables={"HOSTNAME": Variable("second")})
    assert moved_to(without_own_name(first, first), second).variables["HOSTNAME"].value == "second"
    assert moved_to(without_own_name(first, second), second).variables["HOSTNAME"].value == "first"


@pytest.mark.parametrize(
    "name",
    [
        "LD_PRELOAD",
        "BASH_ENV",
        "PYTHONPATH",
        "PERL5LIB",
        "GIT_SSH_COMMAND",
        "PROMPT_COMMAND",
        "NODE_OPTIONS",
        "BASH_FUNC_x%%",
    ],
)
def test_loader_variables_are_known(name: str) -> None:
    assert is_loader(name)


def test_given_variables_are_exported() -> None:
    assert with_variables(BASE, {"v": "1"}).environ == {"v": "1"}
    assert with_variables(BASE, {}) is BASE
