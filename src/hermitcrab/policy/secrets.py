"""Which variables look like secrets. The list itself is data, in `secret_names.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from hermitcrab.convert import Unfit
from hermitcrab.policy import secret_names

_PATTERN = re.compile(r"\*?[A-Za-z0-9_]+\*?|\*")


class Patterns:
    """Names with `*` at the beginning, the end or both, in any case. No regular expressions: some ninety of
    them would take longer to compile than everything else that `local` does at its start."""

    def __init__(self, patterns: Iterable[str]) -> None:
        exact, begins, ends, parts = set(), [], [], []
        for pattern in map(str.upper, patterns):
            text = pattern.strip("*")
            match pattern.startswith("*"), pattern.endswith("*"):
                case False, False:
                    exact.add(text)
                case False, True:
                    begins.append(text)
                case True, False:
                    ends.append(text)
                case _:
                    parts.append(text)
        self._exact, self._begins, self._ends, self._parts = exact, tuple(begins), tuple(ends), tuple(parts)

    def match(self, name: str) -> bool:
        name = name.upper()
        return (
            name in self._exact
            or name.startswith(self._begins)
            or name.endswith(self._ends)
            or any(part in name for part in self._parts)
        )


def checked_patterns(value: object) -> tuple[str, ...]:
    """A setting's patterns, each once; `Unfit` names the one that is none."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise Unfit("takes a list of names")
    for number, pattern in enumerate(value):
        if not isinstance(pattern, str) or not _PATTERN.fullmatch(pattern):
            takes = "takes names of variables, with * at the beginning, the end or both"
            raise Unfit(f"got {pattern!r}, {takes}", str(number))
    return tuple(dict.fromkeys(value))


@dataclass(frozen=True)
class SecretPolicy:
    """What looks like a secret: the built-in list, what a user adds to it, and what a user takes from it."""

    secret: Sequence[str] = ()
    harmless: Sequence[str] = ()

    def is_secret(self, name: str, value: str = "") -> bool:
        if self.is_harmless(name):
            return False
        if self._secret.match(name):
            return True
        return _harmful(name) or is_secret_value(value)

    def is_harmless(self, name: str) -> bool:
        """Whether the user said so."""
        return self._harmless.match(name)

    @cached_property
    def _secret(self) -> Patterns:
        return Patterns(self.secret)

    @cached_property
    def _harmless(self) -> Patterns:
        return Patterns(self.harmless)


def _harmful(name: str) -> bool:
    secret, harmless = _built_in()
    return secret.match(name) and not harmless.match(name)


@cache
def _built_in() -> tuple[Patterns, Patterns]:
    return Patterns(secret_names.SECRET), Patterns(secret_names.HARMLESS)


def is_secret_value(value: str) -> bool:
    """Whether a value gives itself away, whatever it is called: a URL with a password, a known token."""
    return _value_pattern().search(value) is not None


@cache
def _value_pattern() -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{each})" for each in secret_names.VALUES), re.IGNORECASE)
