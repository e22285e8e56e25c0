"""The contract suite on every backend of this machine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab.agent.program import CHOICE
from hermitcrab.backends import registry
from hermitcrab.testing import CASES, Case
from hermitcrab.testing.for_pytest import check, parameters
from tests.conftest import required


@dataclass(frozen=True)
class Kind:
    """A backend, and how it is run."""

    name: str
    backend: str
    variables: Mapping[str, str] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Case -> why this kind honestly cannot meet it."""


KINDS = (
    Kind("local", "local"),
    Kind("local-python", "local", {CHOICE: "python"}),
    Kind("bubblewrap", "bubblewrap"),
)


@functools.cache
def missing(backend: str) -> str:
    """Why a backend cannot run here; empty when it can."""
    health = registry.get(backend).check()
    return "" if health.usable else f"{backend}: {health.detail} {health.hint}"


def needs_backend(backend: str) -> None:
    if reason := missing(backend):
        if backend in required():
            pytest.fail(f"required, but missing: {reason}")
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, *each.values, id=f"{kind.name}-{each.id}", marks=each.marks)
        for kind in KINDS
        for each in parameters(kind.cannot)
    ],
)
def test_promise(kind: Kind, case: Case, quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_backend(kind.backend)
    for name, value in kind.variables.items():
        monkeypatch.setenv(name, value)

    def opener(**options: Any) -> hermitcrab.Environment:
        return hermitcrab.open(kind.backend, **options)

    check(case, opener)


def test_every_case_states_its_promise() -> None:
    assert len(CASES) > 200
    for case in CASES.values():
        assert case.promise.endswith("."), case.name
        assert "\n" not in case.promise


def test_an_unknown_case_in_the_mapping_is_an_error() -> None:
    with pytest.raises(ValueError, match="no case is named nonsense"):
        parameters({"nonsense": "because"})
