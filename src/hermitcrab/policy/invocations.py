"""A command whose words are known: it counts, and so does what it runs in its turn."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

from hermitcrab.policy import builtins
from hermitcrab.policy.arguments import SHELLS, WRAPPERS, inner, shell_call
from hermitcrab.policy.scene import Command, Reading, Scope
from hermitcrab.policy.words import UNKNOWN, Word

if TYPE_CHECKING:
    from tree_sitter import Node

    from hermitcrab.policy.documents import Bare

MOST_COMMANDS = 1000
_DEEPEST = 40
_OF_THE_SHELL = ("command", "builtin", "time", "!", "exec")
"""Wrappers that run a builtin in the shell itself."""


class Shell(Protocol):
    """The reader of the text, as a command in it knows it."""

    scope: Scope

    def text(self, text: str) -> str | None: ...
    def body(self, node: Node, bare: Bare, stdin: str | None) -> str | None: ...
    def subshell(self) -> AbstractContextManager[Scope]: ...


class Invocations:
    """Notes commands. Each method that runs one returns what it would print, if that is known."""

    def __init__(self, shell: Shell, reading: Reading, aliases: Mapping[str, str]) -> None:
        self._shell = shell
        self._reading = reading
        self._aliases = aliases
        self._under: tuple[str, ...] = ()
        self._functions: list[str] = []
        """Those that are being called: one that calls itself is not gone through again."""

    def written(self, words: Sequence[Word], stdin: str | None, writes: Sequence[Word]) -> str | None:
        """A command as somebody wrote it: its first word may be an alias."""
        meaning = self._aliases.get(words[0].text, "").split() if words and words[0].bare else []
        if meaning and meaning[0] != words[0].text:
            one = len(meaning) == 1
            first = [words[0]._replace(text=meaning[0])] if one else [Word(each) for each in meaning]
            words = [*first, *words[1:]]
        return self.run(words, stdin, writes)

    def run(self, words: Sequence[Word], stdin: str | None, writes: Sequence[Word]) -> str | None:
        name = posixpath.basename(words[0].text) if words else ""
        function = name in self._shell.scope.functions and name == words[0].text and _may_call(self._under)
        self.note(words, writes, function=function)
        if not words or len(self._reading.commands) >= MOST_COMMANDS:
            return None
        if function:
            return self._call(name, words[1:], stdin)
        if name in SHELLS:
            return self._start(words[1:], stdin)
        if name in WRAPPERS:
            return self._wrapped(name, words[1:], stdin)
        if name == "eval":
            return self._evaluate(words[1:])
        for more in builtins.commands_within(name, words[1:], stdin):
            self._beneath(name, more, None)
        for text in builtins.texts_within(name, words[1:]):
            self._shell.text(text)
        builtins.changes(name, words[1:], self._shell.scope)
        return builtins.printed(name, words[1:], stdin, self._shell.scope)

    def note(self, words: Sequence[Word], writes: Sequence[Word], *, function: bool = False) -> None:
        scope = self._shell.scope
        if words or writes:
            self._reading.commands.append(
                Command(
                    tuple(words),
                    cwd=scope.cwd,
                    home=scope.lookup("HOME"),
                    user=scope.lookup("USER"),
                    writes=tuple(writes),
                    function=function,
                    under=self._under,
                )
            )

    def _beneath(self, name: str, words: Sequence[Word], stdin: str | None) -> str | None:
        under, self._under = self._under, (*self._under, name)
        try:
            return self.run(words, stdin, ()) if len(self._under) < _DEEPEST else None
        finally:
            self._under = under

    def _wrapped(self, name: str, words: Sequence[Word], stdin: str | None) -> str | None:
        found = inner(name, words)
        if found is None:
            return builtins.printed(name, words, stdin, self._shell.scope)
        with nullcontext() if name in _OF_THE_SHELL else self._shell.subshell():
            if found.directory is not None:
                builtins.changes("cd", [Word(found.directory)], self._shell.scope)
            if found.code is not None:
                return self._shell.text(found.code)
            return self._beneath(name, found.words, stdin)

    def _start(self, words: Sequence[Word], stdin: str | None) -> str | None:
        """Another shell: what it is told to run, or finds on its stdin."""
        call = shell_call(words)
        code = call.code if call.code is not None else stdin if call.reads_input else None
        if code is None:
            return None
        with self._shell.subshell() as scope:
            scope.parameters([word.text for word in call.parameters])
            return self._shell.text(code)

    def _evaluate(self, words: Sequence[Word]) -> str | None:
        code = " ".join(word.text for word in words)
        if UNKNOWN in code:
            self._shell.scope.complete = False  # it may set anything
        return self._shell.text(code)

    def _call(self, name: str, words: Sequence[Word], stdin: str | None) -> str | None:
        if name in self._functions:
            return None
        scope = self._shell.scope
        function = scope.functions[name]
        before = scope.variables.copy()
        scope.parameters([word.text for word in words])
        self._functions.append(name)
        try:
            return (
                self._shell.text(function)
                if isinstance(function, str)
                else self._shell.body(*function, stdin)
            )
        finally:
            self._functions.pop()
            scope.variables |= {key: before[key] for key in before if key.isdigit() or key in ("@", "*")}


def _may_call(under: Sequence[str]) -> bool:
    """Whether a function can be meant there: wrappers that are no words of the shell itself run programs."""
    return not set(under) - {"time", "!", "coproc"}
