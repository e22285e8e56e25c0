"""The contract suite on every backend of this machine."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hermitcrab
from hermitcrab.agent.program import CHOICE
from hermitcrab.backends import registry
from hermitcrab.testing import CASES, Case
from hermitcrab.testing.for_pytest import check, parameters
from tests import engines
from tests.conftest import required
from tests.test_plain import CANNOT as WITHOUT_AN_AGENT

if TYPE_CHECKING:
    from _pytest.mark import MarkDecorator, ParameterSet


@dataclass(frozen=True)
class Kind:
    """A backend, and how it is run."""

    name: str
    backend: str
    variables: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Case -> why this kind honestly cannot meet it."""
    requirement: str = ""
    """Its name in HERMITCRAB_REQUIRE, where that is not the backend's."""
    sampled: frozenset[str] | None = None
    """Slow, or mostly a variation of another kind: `make test` asks it the cases of these modules alone."""


SAMPLE = frozenset({"state", "endings", "kills", "given", "files", "terminals", "background", "loss"})
"""The modules of cases that a sampled kind is asked in `make test`; `make test-all` asks all."""
WITHOUT_AGENT = frozenset({"state", "kills", "given", "files"})

KINDS = (
    Kind("local", "local"),
    Kind("local-python", "local", {CHOICE: "python"}),
    Kind("bubblewrap", "bubblewrap"),
    Kind("docker", "docker", options={"image": engines.IMAGE}),
    Kind(
        "gvisor",
        "docker",
        options={"image": engines.IMAGE, "runtime": "runsc"},
        requirement="gvisor",
        sampled=SAMPLE,
    ),
    Kind(
        "docker-plain",
        "docker",
        {CHOICE: "none"},
        options={"image": engines.IMAGE},
        cannot=WITHOUT_AN_AGENT,
        sampled=WITHOUT_AGENT,
    ),
    Kind("podman", "podman", options={"image": engines.IMAGE}, sampled=SAMPLE),
    Kind("ssh", "ssh", options=engines.SSH),
    Kind("apptainer", "apptainer", options=engines.APPTAINER, sampled=SAMPLE),
)


def tier(kind: Kind, each: ParameterSet) -> list[MarkDecorator]:
    case = each.values[0]
    assert isinstance(case, Case)
    everyday = kind.sampled is None or case.module in kind.sampled
    return [] if everyday else [pytest.mark.thorough]


@functools.cache
def missing(backend: str) -> str:
    """Why a backend cannot run here; empty when it can."""
    health = registry.get(backend).check()
    return "" if health.usable else f"{backend}: {health.detail} {health.hint}"


def needs_backend(backend: str, requirement: str = "") -> None:
    if reason := missing(backend):
        if (requirement or backend) in required():
            pytest.fail(f"required, but missing: {reason}")
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, *each.values, id=f"{kind.name}-{each.id}", marks=[*each.marks, *tier(kind, each)])
        for kind in KINDS
        for each in parameters(kind.cannot)
    ],
)
def test_promise(kind: Kind, case: Case, quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_backend(kind.backend, kind.requirement)
    for name, value in kind.variables.items():
        monkeypatch.setenv(name, value)

    def opener(**options: Any) -> hermitcrab.Environment:
        with warnings.catch_warnings():
            # It says that it has to do without the agent, or without a limit.
            warnings.simplefilter("ignore", hermitcrab.HermitcrabWarning)
            return hermitcrab.open(kind.backend, **{**kind.options, **options})

    check(case, opener)


def test_every_case_states_its_promise() -> None:
    assert len(CASES) > 200
    for case in CASES.values():
        assert case.promise.endswith("."), case.name
        assert "\n" not in case.promise


def test_an_unknown_case_in_the_mapping_is_an_error() -> None:
    with pytest.raises(ValueError, match="no case is named nonsense"):
        parameters({"nonsense": "because"})
