"""The cases as parameters for pytest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

from hermitcrab.testing.known import LIMITS
from hermitcrab.testing.suite import CASES, Case, Inapplicable, Opener

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet


def parameters(cannot: Mapping[str, str] | None = None) -> list[ParameterSet]:
    """One parameter per case. `cannot` names the cases that a provider truly cannot meet, with the reasons.

    Such a case must fail, so that the reason goes away with the inability. Those in `LIMITS` are added.
    """
    cannot = {**LIMITS, **(cannot or {})}
    if unknown := cannot.keys() - CASES.keys():
        raise ValueError(f"no case is named {', '.join(sorted(unknown))}")
    return [
        pytest.param(
            each,
            id=each.name,
            marks=[pytest.mark.xfail(reason=cannot[each.name], strict=True)] if each.name in cannot else [],
        )
        for each in CASES.values()
    ]


def check(case: Case, opener: Opener) -> None:
    """Run a case; what the sandbox lacks for it is a skip."""
    try:
        case.run(opener)
    except Inapplicable as reason:
        pytest.skip(str(reason))
