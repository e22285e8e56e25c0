"""What a case is, and how one is run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hermitcrab.environment import Environment


class Opener(Protocol):
    """Opens a fresh sandbox of the kind under test. The options are those of any session."""

    def __call__(self, **options: Any) -> Environment: ...


class Inapplicable(Exception):
    """The sandbox lacks something that a case needs in order to ask its question (root, a program)."""


@dataclass(frozen=True)
class Case:
    """One promise of the command path."""

    name: str
    promise: str
    function: Callable[[Opener], None]
    module: str
    """Which part of the command path it is about: the name of its module."""

    def run(self, opener: Opener) -> None:
        """Ask it of a fresh sandbox. A broken promise is an AssertionError; every sandbox is cleaned up."""
        with ExitStack() as stack:

            def open(**options: Any) -> Environment:
                environment = opener(**options)
                stack.callback(environment.cleanup)
                return environment

            self.function(open)

    def __str__(self) -> str:
        return self.name


CASES: dict[str, Case] = {}
"""Every case by its name, in the order of the modules of `hermitcrab.testing.cases`."""


def case(function: Callable[[Opener], None]) -> Callable[[Opener], None]:
    """Make a case of a function; its name and docstring say what is promised."""
    _add(function.__name__, function, function)
    return function


def each(
    items: Iterable[str] | Mapping[str, Any],
) -> Callable[[Callable[[Opener, Any], None]], Callable[[Opener, Any], None]]:
    """Make one case for each item; a mapping names its values."""
    named = items if isinstance(items, Mapping) else {item: item for item in items}

    def decorate(function: Callable[[Opener, Any], None]) -> Callable[[Opener, Any], None]:
        for name, value in named.items():
            _add(f"{function.__name__}[{name}]", function, partial(_with, function, value))
        return function

    return decorate


def _with(function: Callable[[Opener, Any], None], value: Any, open: Opener) -> None:
    function(open, value)


def _add(name: str, written: Callable[..., None], function: Callable[[Opener], None]) -> None:
    promise = written.__doc__
    if not promise or "\n" in promise:
        raise TypeError(f"case {name} needs a docstring of one line that states the promise")
    if name in CASES:
        raise TypeError(f"two cases are named {name}")
    CASES[name] = Case(name, promise, function, written.__module__.rpartition(".")[2])
