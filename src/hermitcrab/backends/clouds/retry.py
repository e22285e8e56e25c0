"""A call to a provider that failed: what it means, and whether it may be repeated."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hermitcrab.errors import SandboxError

T = TypeVar("T")

PAUSES = (0.2, 0.8, 2.0)
"""Seconds before each further attempt, more or less."""
PASSING_STATUSES = frozenset({408, 425, 429, *range(500, 600)})
_LONGEST_PAUSE = 60.0


@dataclass(frozen=True)
class Failure:
    """What an SDK's exception means."""

    error: SandboxError
    """What the user is told, in the provider's own words."""
    passing: bool = False
    """May be over in a moment; whether the call had an effect is not known."""
    refused: bool = False
    """May be over in a moment, and the call had no effect."""
    retry_after: float | None = None
    """Seconds that the provider asks us to wait."""


def meant(
    error: Exception,
    meanings: Callable[[], Mapping[type[BaseException], Callable[[Any], Failure]]],
    unknown: Callable[[str], SandboxError],
) -> Failure:
    """The first class of the exception that has a meaning gives it."""
    if isinstance(error, SandboxError):
        return Failure(error)
    known = meanings()
    meaning = next((known[each] for each in type(error).__mro__ if each in known), None)
    if meaning is not None:
        return meaning(error)
    return Failure(unknown(str(error) if type(error) is Exception else f"{type(error).__name__}: {error}"))


def retry_after(header: str) -> float | None:
    """Seconds; None where a provider gives a date, or nothing."""
    try:
        return max(0.0, float(header))
    except ValueError:
        return None


async def persistently(
    call: Callable[[], Awaitable[T]], understood: Callable[[Exception], Failure], *, repeatable: bool = True
) -> T:
    """The call's result. A passing failure is tried again, three times at most.

    What is not `repeatable` is repeated only after a failure that had no effect.
    """
    for pause in (*PAUSES, None):
        try:
            return await call()
        except Exception as error:
            failure = understood(error)
            again = failure.refused or (failure.passing and repeatable)
            if pause is None or not again:
                raise failure.error from error
            wait = pause * random.uniform(0.5, 1.5) if failure.retry_after is None else failure.retry_after
        await asyncio.sleep(min(wait, _LONGEST_PAUSE))
    raise AssertionError("the last attempt returns or raises")
