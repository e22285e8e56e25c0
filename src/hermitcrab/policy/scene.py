"""What is known of a shell while its text is read, and what is found in it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from hermitcrab.core.state import ShellState, path_in
from hermitcrab.policy.words import UNKNOWN, Word

if TYPE_CHECKING:
    from tree_sitter import Node

    from hermitcrab.policy.documents import Bare

_DYNAMIC = re.compile(
    r"BASH.*|RANDOM|SRANDOM|SECONDS|LINENO|EPOCH.*|PPID|E?UID|GROUPS|FUNCNAME|DIRSTACK|PIPESTATUS|OPT(IND|ARG)"
    r"|REPLY|MAPFILE|COPROC.*|HISTCMD|COMP_.*|SHLVL|OSTYPE|HOSTTYPE|MACHTYPE|HOSTNAME|SHELLOPTS|IFS|_|[?$!#0-]"
)
"""Variables that bash sets by itself, and so may have although nobody set them."""

_OF_THE_SYSTEM = re.compile(rf"{UNKNOWN}|/s?bin$|/(?:usr|opt|nix|snap|run)/(?:.+/)?s?bin$")
"""Directories of programs that everybody means by their names, as far as they are known."""


class Scene(NamedTuple):
    """What is known of the shell that would run the text."""

    cwd: str = UNKNOWN
    variables: Mapping[str, str] | None = None
    """All that are set. None: nothing is known of any."""
    functions: Mapping[str, str] = MappingProxyType({})
    """Their bodies, from the brace on."""
    aliases: Mapping[str, str] = MappingProxyType({})


def scene_of(state: ShellState, cwd: str, given: Mapping[str, str]) -> Scene:
    """A session's shell, about to run a command in `cwd`; `given` are variables beside the state's."""
    variables = {}
    for name, (value, _) in state.variables.items():
        if isinstance(value, str):
            variables[name] = value
        elif value:
            variables[name] = value[0][1]
            variables[f"{name}[@]"] = " ".join(text for _, text in value)
    functions = {name: function.body for name, function in state.functions.items()}
    return Scene(path_in(state, cwd), variables | dict(given), functions, state.aliases)


@dataclass(frozen=True)
class Command:
    """A simple command that would be run."""

    words: Sequence[Word]
    """The program and its arguments; none when there is only a redirection."""
    cwd: str = UNKNOWN
    home: str = UNKNOWN
    user: str = UNKNOWN
    writes: Sequence[Word] = ()
    """Files that its output goes to."""
    function: bool = False
    """It is a function of the shell that is called, and not the program of that name."""
    under: tuple[str, ...] = ()
    """The wrappers that it runs under, outermost first."""

    @property
    def name(self) -> str:
        return posixpath.basename(self.words[0].text) if self.words else ""

    @property
    def program(self) -> str:
        """Its name, if it is a program of the system, and no function or somebody's own `./shutdown`."""
        directory = posixpath.dirname(self.words[0].text) if self.words else ""
        own = self.function or (directory and not _OF_THE_SYSTEM.match(self.path(directory)))
        return "" if own else self.name

    @property
    def shown(self) -> str:
        """For people."""
        words = [word.text for word in self.words] + [f"> {word.text}" for word in self.writes]
        text = " ".join(words).replace(UNKNOWN, "?")
        return f"`{text if len(text) <= 80 else text[:77] + '...'}`"

    def path(self, text: str) -> str:
        """A path of its arguments, absolute and without dots; `UNKNOWN` when it cannot be told."""
        whole = posixpath.join(self.cwd, text)
        if UNKNOWN in whole or not whole.startswith("/"):
            return UNKNOWN
        return "/" + posixpath.normpath(whole).lstrip("/")


@dataclass
class Reading:
    """What was found."""

    commands: list[Command] = field(default_factory=list)
    bombs: list[str] = field(default_factory=list)
    """Functions and loops that start themselves again and again."""


@dataclass
class Scope:
    """A shell's variables, directory and functions, as far as they are known at some point of the text."""

    cwd: str
    variables: dict[str, str]
    complete: bool
    """A name that is not among the variables is not set."""
    functions: dict[str, tuple[Node, Bare] | str]

    @classmethod
    def of(cls, scene: Scene) -> Scope:
        known = scene.variables is not None
        return cls(scene.cwd, dict(scene.variables or {}), known, dict(scene.functions))

    def copy(self) -> Scope:
        return replace(self, variables=dict(self.variables), functions=dict(self.functions))

    def lookup(self, name: str) -> str:
        if name == "PWD":
            return self.cwd
        if name in ("UID", "EUID"):
            return self.variables.get("USER") or UNKNOWN  # by name or by number, it is the same user
        known = self.variables.get(name)
        if known is not None:
            return known
        base, subscript, _ = name.partition("[")
        if (subscript and base in self.variables) or _DYNAMIC.fullmatch(base):
            return UNKNOWN
        return "" if self.complete else UNKNOWN

    def parameters(self, words: Sequence[str] | None) -> None:
        """Set $1 and the rest; None: they are unknown."""
        for name in [name for name in self.variables if name.isdigit() or name in "@*"]:
            del self.variables[name]
        known = [UNKNOWN] if words is None else words
        self.variables |= {"@": " ".join(known), "*": " ".join(known)}
        numbers = range(1, max(len(known), 9) + 1)
        rest = UNKNOWN if words is None else ""
        self.variables |= {str(at): known[at - 1] if at <= len(known) else rest for at in numbers}
