"""The suite itself is tested: every mutant fails the cases that it names, and the real thing passes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab.testing import CASES, Opener
from hermitcrab.testing.mutants import MUTANTS, Mutant

DESIGNED = {
    "no_dump_on_exit",
    "kills_the_process_group_only",
    "runs_a_command_twice",
    "in_band_marker",
    "carries_errexit",
    "believes_half_a_state",
}


@pytest.fixture
def opener(quiet_home: Path) -> Opener:
    def open(**options: Any) -> hermitcrab.Environment:
        return hermitcrab.open("local", **options)

    return open


PAIRS = [
    pytest.param(mutant, name, id=f"{mutant.name}-{name}")
    for mutant in MUTANTS.values()
    for name in mutant.caught_by
]


@pytest.mark.parametrize(("mutant", "name"), PAIRS)
def test_a_mutant_is_caught(mutant: Mutant, name: str, opener: Opener) -> None:
    with mutant.alive(), pytest.raises((AssertionError, hermitcrab.SandboxError)):
        CASES[name].run(opener)


@pytest.mark.parametrize("name", sorted({name for mutant in MUTANTS.values() for name in mutant.caught_by}))
def test_the_real_thing_passes_the_same_cases(name: str, opener: Opener) -> None:
    CASES[name].run(opener)


def test_a_mutant_is_gone_when_its_context_ends(opener: Opener) -> None:
    for mutant in MUTANTS.values():
        with mutant.alive():
            pass
    CASES["a_command_runs_exactly_once"].run(opener)


def test_the_mutants_of_the_design_are_there() -> None:
    names: Mapping[str, Mutant] = MUTANTS
    assert names.keys() >= DESIGNED
    assert all(mutant.caught_by and mutant.wrong for mutant in names.values())
