"""Goes through a parsed text as bash would, and notes every command that it would run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

from hermitcrab.policy import bombs
from hermitcrab.policy.documents import Bare, Document, simplified
from hermitcrab.policy.expansion import Expander
from hermitcrab.policy.invocations import Invocations
from hermitcrab.policy.scene import Reading, Scope
from hermitcrab.policy.words import UNKNOWN, Word

if TYPE_CHECKING:
    from tree_sitter import Language, Node

LONGEST = 1 << 16
"""Bytes of a text that are parsed as a whole; of a longer one only lines that matter, each by itself."""
_LONGEST_ROUGH = 1 << 12
_MOST_STEPS = 10_000
_MOST_ROUNDS = 16
_DEEPEST = 40
_DEEPEST_TEXT = 6


class _Redirections:
    """What the redirections of a command make of it."""

    def __init__(self, stdin: str | None) -> None:
        self.stdin = stdin
        self.writes: list[Word] = []
        self.arguments: list[Node] = []
        """Words of the command that stand behind a redirection."""


class Reader:
    def __init__(self, reading: Reading, scope: Scope, aliases: Mapping[str, str]) -> None:
        self.scope = scope
        self._reading = reading
        self._invocations = Invocations(self, reading, aliases)
        self._texts = 0
        self._depth = 0
        self._steps = 0
        self._bare = Bare(b"", {}, frozenset())
        self._expander = self._expander_of(b"", None)

    def text(self, text: str, at: int | None = None) -> str | None:
        """Read a text in the present scope; returns what it prints, if that is known."""
        if self._texts >= _DEEPEST_TEXT or len(text) > LONGEST:
            return None
        at = None if UNKNOWN in text else at  # what is put in its place is longer
        bare = simplified(text.replace(UNKNOWN, "${__unknown}").encode(errors="surrogateescape"))
        root = _parse(bare.source)
        before = self._expander, self._bare
        self._expander, self._bare = self._expander_of(bare.source, at), bare
        self._texts += 1
        try:
            self._reading.bombs += bombs.found_in(root)
            if b"function" in bare.source or b")" in bare.source:
                self._define_all(root)
            return self._walk(root, None)
        finally:
            self._texts -= 1
            self._expander, self._bare = before

    @contextmanager
    def subshell(self) -> Iterator[Scope]:
        """While entered, a scope of its own, which changes nothing of the one before."""
        scope, self.scope = self.scope, self.scope.copy()
        try:
            yield self.scope
        finally:
            self.scope = scope

    def body(self, node: Node, bare: Bare, stdin: str | None) -> str | None:
        """Read the body of a function, in the present scope."""
        before = self._expander, self._bare
        at = self._expander.at if bare is self._bare else None
        self._expander, self._bare = self._expander_of(bare.source, at), bare
        try:
            return self._walk(node, stdin)
        finally:
            self._expander, self._bare = before

    def _expander_of(self, source: bytes, at: int | None) -> Expander:
        # The scope changes on the way, so it is asked for each time.
        return Expander(
            source,
            lookup=lambda name: self.scope.lookup(name),
            assign=lambda name, value: self.scope.variables.__setitem__(name, value),
            substitute=lambda node: self._walk(node, None),
            evaluate=self.text,
            at=at,
        )

    def roughly(self, text: str) -> None:
        """What does not parse: anything that looks like a command is taken for one."""
        for part in re.split(r"[;&|(){}`\n]|\b(?:then|do|else)\b", text[:_LONGEST_ROUGH]):
            words = re.findall(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*'|["'\\])+""", part)
            plain = [re.sub(r"""\\(.)|["']""", r"\1", word) for word in words]
            self._invocations.run([Word(each) for each in plain], None, ())

    def _walk(self, node: Node, stdin: str | None) -> str | None:
        """Read a statement; returns what it prints, if that is known."""
        self._steps += 1
        if self._depth > _DEEPEST or self._steps > _MOST_STEPS:
            return None
        self._depth += 1
        try:
            match node.type:
                case "command":
                    return self._command(node, _Redirections(stdin))
                case "redirected_statement":
                    return self._redirected(node, stdin)
                case "pipeline":
                    return self._pipeline(node, stdin)
                case "subshell" | "command_substitution" | "process_substitution":
                    return self._apart(node, stdin)
                case "list":
                    return self._list(node, stdin)
                case "if_statement":
                    return self._if(node, stdin)
                case "postfix_expression" | "binary_expression" | "unary_expression":
                    self._calculate(node)
                case "for_statement":
                    return self._for(node, stdin)
                case "function_definition":
                    return self._definition(node)
                case "variable_assignment":
                    return self._assign(node)
                case "declaration_command" | "unset_command":
                    return self._declaration(node)
                case "ERROR":
                    self.roughly(self._expander.text(node))
                case "comment":
                    return ""
                case "concatenation" | "string" | "expansion" | "simple_expansion" | "arithmetic_expansion":
                    self._expander.pieces(node)
                    return ""
            return self._statements(node, stdin)
        finally:
            self._depth -= 1

    def _statements(self, node: Node, stdin: str | None) -> str | None:
        printed: list[str | None] = []
        for child in node.named_children:
            apart = bombs.in_background(child)
            printed.append(self._apart(child, stdin, whole=True) if apart else self._walk(child, stdin))
        return _joined(printed)

    def _apart(self, node: Node, stdin: str | None, *, whole: bool = False) -> str | None:
        with self.subshell():
            return self._walk(node, stdin) if whole else self._statements(node, stdin)

    def _pipeline(self, node: Node, stdin: str | None) -> str | None:
        for child in node.named_children:
            stdin = self._apart(child, stdin, whole=True)
        return stdin

    def _list(self, node: Node, stdin: str | None) -> str | None:
        if node.child_count != 3:
            return self._statements(node, stdin)
        left, operator, right = node.children
        if operator.type == "||":
            with self._supposing(left, right):
                self._apart(right, stdin, whole=True)  # what the left side did, it failed to do
            self._walk(left, stdin)
            return None
        printed = self._walk(left, stdin)
        with self._supposing(left, right):
            return _joined([printed, self._walk(right, stdin)])

    def _if(self, node: Node, stdin: str | None) -> str | None:
        condition = node.child_by_field_name("condition")
        with self._supposing(condition or node, node):
            return self._statements(node, stdin)

    @contextmanager
    def _supposing(self, test: Node, then: Node) -> Iterator[None]:
        """A variable that is tested is not known to be empty where the test has decided.

        Nor is it afterwards, if a test ends it all otherwise.
        """
        tests = [each for each in bombs.nodes(test) if each.type == "test_command"]
        names = {
            self._expander.text(each)
            for test in tests
            for each in bombs.nodes(test)
            if each.type in ("variable_name", "special_variable_name")
        }
        if "#" in names:
            names.update(name for name in self.scope.variables if name.isdigit())
        empty = [name for name in names if not self.scope.lookup(name)]
        self.scope.variables |= dict.fromkeys(empty, UNKNOWN)
        yield
        if not self._may_end(then):
            for name in empty:
                if self.scope.variables.get(name) == UNKNOWN:
                    del self.scope.variables[name]

    def _may_end(self, statement: Node) -> bool:
        """Whether the shell may end in there, or in a function such as `die` that is called there."""
        names = [self._expander.text(each) for each in bombs.nodes(statement) if each.type == "command_name"]
        called = [self.scope.functions.get(name) for name in names]
        return bombs.leaves(statement) or any(
            "exit" in each if isinstance(each, str) else each is not None and bombs.leaves(each[0])
            for each in called
        )

    def _for(self, node: Node, stdin: str | None) -> str | None:
        name, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        values = [
            word for each in node.children_by_field_name("value") for word in self._expander.words(each)
        ]
        if name is None or body is None:
            return self._statements(node, stdin)
        for value in values[:_MOST_ROUNDS] or [Word(UNKNOWN)]:
            self.scope.variables[self._expander.text(name)] = value.text
            self._walk(body, stdin)
        return None

    def _define_all(self, root: Node) -> None:
        """What is called in a function or a trap may be defined further down."""
        for node in bombs.nodes(root):
            if node.type == "function_definition":
                name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
                if name is not None and body is not None:
                    self.scope.functions.setdefault(self._expander.text(name), (body, self._bare))

    def _definition(self, node: Node) -> str:
        name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
        if name is not None and body is not None:
            self.scope.functions[self._expander.text(name)] = (body, self._bare)
            with self.subshell() as scope:
                scope.parameters(None)
                self._walk(body, None)
        return ""

    def _calculate(self, node: Node) -> None:
        """Arithmetic may set what it names."""
        for child in node.named_children:
            if child.type == "variable_name":
                self.scope.variables[self._expander.text(child)] = UNKNOWN

    def _assign(self, node: Node) -> str:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None:
            return ""
        key, variables = self._expander.text(name), self.scope.variables
        more = any(child.type == "+=" for child in node.children)
        if value is not None and value.type == "array":
            items = [word.text for each in value.named_children for word in self._expander.words(each)]
            before = [self.scope.lookup(f"{key}[@]")] if more else []
            variables[f"{key}[@]"] = " ".join([*before, *items])
            variables[key] = UNKNOWN if more else (items or [""])[0]
        elif "[" in key:
            self._expander.value(value)
            variables[key.partition("[")[0]] = UNKNOWN
            variables.pop(key.partition("[")[0] + "[@]", None)
        else:
            new = self._expander.value(value)
            variables[key] = self.scope.lookup(key) + new if more else new
        return ""

    def _declaration(self, node: Node) -> str:
        for child in node.named_children:
            if child.type == "variable_assignment":
                self._assign(child)
            elif child.type == "variable_name" and node.type == "unset_command":
                self.scope.variables[self._expander.text(child)] = ""
            elif child.type != "variable_name":
                for word in self._expander.words(child):
                    name, equals, value = word.text.partition("=")
                    if equals:
                        self.scope.variables[name] = value
        return ""

    def _redirected(self, node: Node, stdin: str | None) -> str | None:
        body, redirections = node.child_by_field_name("body"), _Redirections(stdin)
        for child in node.named_children:
            if child != body:
                self._redirect(child, redirections)
        if body is not None and body.type == "command":
            return self._command(body, redirections)
        printed = None if body is None else self._walk(body, redirections.stdin)
        if body is None or redirections.writes:
            self._invocations.note([], redirections.writes)
        return None if redirections.writes else printed

    def _redirect(self, node: Node, found: _Redirections) -> None:
        """Note what a redirection means for its command."""
        expander = self._expander
        words = node.children_by_field_name("destination")
        if node.type == "ERROR":
            self.roughly(expander.text(node))
        if node.type != "file_redirect":
            return
        sign = next((child for child in node.children if not child.is_named), node)
        # The parser counts everything up to the next redirection, but only one word is meant.
        found.arguments += words[1:]
        if document := self._bare.documents.get(sign.start_byte):
            found.stdin = self._document(document)
        elif sign.start_byte in self._bare.strings:
            found.stdin = expander.value(words[0]) + "\n" if words else UNKNOWN
        elif words:
            target = expander.words(words[0])
            found.writes += target if sign.type in _WRITING else []

    def _document(self, document: Document) -> str:
        text = document.text.decode(errors="surrogateescape")
        if document.literal or not set("$`\\") & set(text):
            return text
        # As in double quotes, but that these are no quotes in there; which they become is of no consequence.
        quoted = b'"' + document.text.replace(b'"', b"'") + b'"'
        commands = [child for child in _parse(quoted).named_children if child.type == "command"]
        if len(commands) != 1:
            return text
        before, at = (self._expander, self._bare), self._expander.at
        self._expander = self._expander_of(quoted, None if at is None else at + document.start - 1)
        self._bare = Bare(quoted, {}, frozenset())
        try:
            return self._expander.value(commands[0].child_by_field_name("name"))
        finally:
            self._expander, self._bare = before

    def _command(self, node: Node, found: _Redirections) -> str | None:
        nodes: list[Node] = []
        for child in node.children:
            if child.type == "variable_assignment":
                self._expander.value(child.child_by_field_name("value"))
            elif child.type in ("file_redirect", "ERROR"):
                self._redirect(child, found)
            elif (child.is_named and child.type != "comment") or child.type in ("=~", "=="):
                nodes.append(child)
        words = self._expander.words(*nodes, *found.arguments)
        printed = self._invocations.written(words, found.stdin, found.writes)
        return None if found.writes else printed


def _joined(printed: Sequence[str | None]) -> str | None:
    return None if None in printed else "".join(map(str, printed))


_WRITING = (">", ">>", ">|", "&>", "&>>", "<>", ">&")


def _parse(source: bytes) -> Node:
    from tree_sitter import Parser

    return Parser(_language()).parse(source).root_node


@cache
def _language() -> Language:
    # Only here, because most sessions never need it.
    import tree_sitter_bash
    from tree_sitter import Language

    return Language(tree_sitter_bash.language())
