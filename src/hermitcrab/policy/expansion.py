"""From the nodes of a parsed text to the words they mean: variables looked up, substitutions asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hermitcrab.policy.words import (
    UNKNOWN,
    Kind,
    Piece,
    Word,
    ansi_c,
    in_double_quotes,
    trimmed,
    unescaped,
    value_of,
    words_of,
)

if TYPE_CHECKING:
    from tree_sitter import Node

_PARAMETER = re.compile(
    r"\$\{(!?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(\[[^\]]*\])?(?:(:?[-=+?]|##?|%%?)(.*))?\}", re.DOTALL
)
_NO_GAP = re.compile(rb"(?:\\.)*", re.DOTALL)
_BACKTICK = re.compile(r"(?<!\\)`")
_IN_BACKTICKS = re.compile(r"\\([\\$`])")
_LISTS = ("@", "*")


class Expander(NamedTuple):
    """Makes words of nodes."""

    source: bytes
    lookup: Callable[[str], str]
    """A variable's value, with `UNKNOWN` for what is not known of it."""
    assign: Callable[[str, str], None]
    """What `${x:=value}` does."""
    substitute: Callable[[Node], str | None]
    """What a command substitution prints, where that can be known."""
    evaluate: Callable[[str], str | None]
    """The same for a substitution that the parser did not see as one."""
    at: int | None
    """Where the source begins in the text that was read; None when it is no part of that."""

    def words(self, *nodes: Node) -> list[Word]:
        """The words that these nodes are. What no blank parts is one word, whatever the parser says."""
        groups: list[list[Node]] = []
        for node in nodes:
            if groups and _NO_GAP.fullmatch(self.source[groups[-1][-1].end_byte : node.start_byte]):
                groups[-1].append(node)
            else:
                groups.append([node])
        return [word for group in groups for word in self._of_group(group)]

    def _of_group(self, nodes: Sequence[Node]) -> list[Word]:
        start, end = nodes[0].start_byte, nodes[-1].end_byte
        pieces = self.pieces(nodes[0]) if len(nodes) == 1 else self._concatenation(nodes, start, end)
        place = (-1, -1) if self.at is None else (self.at + start, self.at + end)
        return words_of(pieces, self.lookup("HOME"), *place)

    def value(self, node: Node | None) -> str:
        return "" if node is None else value_of(self.pieces(node), self.lookup("HOME"))

    def text(self, node: Node) -> str:
        return self._between(node.start_byte, node.end_byte)

    def quoted(self, node: Node, start: int, end: int) -> str:
        """What stands between two bytes of the source in double quotes, or in a here-document."""
        parts, at = [], start
        for child in node.named_children:
            if child.type.endswith(("expansion", "substitution")) and start <= child.start_byte < end:
                parts.append(in_double_quotes(self._between(at, child.start_byte)))
                parts += [piece.text for piece in self.pieces(child)]
                at = child.end_byte
        return "".join([*parts, in_double_quotes(self._between(at, end))])

    def pieces(self, node: Node) -> list[Piece]:
        match node.type:
            case "string":
                lists = [child for child in node.named_children if self._is_list(child)]
                if lists and len(node.named_children) == 1:  # "$@" is as many words as it has
                    return [*self.pieces(lists[0])]
                return [Piece(self.quoted(node, node.start_byte + 1, node.end_byte - 1), Kind.QUOTED)]
            case "raw_string":
                return [Piece(self.text(node)[1:-1], Kind.QUOTED)]
            case "ansi_c_string":
                return [Piece(ansi_c(self.text(node)[2:-1]), Kind.QUOTED)]
            case "simple_expansion":
                return [Piece(self.lookup(self.text(node)[1:]), Kind.EXPANDED)]
            case "expansion":
                return [Piece(self._parameter(node), Kind.EXPANDED)]
            case "command_substitution":
                return self._substitution(node)
            case "process_substitution":
                self.substitute(node)
                return [Piece(UNKNOWN, Kind.QUOTED)]
            case "arithmetic_expansion":
                self._look_within(node)
                return [Piece(UNKNOWN, Kind.QUOTED)]
            case "translated_string" | "command_name":
                return [piece for child in node.named_children for piece in self.pieces(child)]
            case "concatenation":
                return self._concatenation(node.children, node.start_byte, node.end_byte)
            case "array":
                self._look_within(node)
                return [Piece(UNKNOWN, Kind.EXPANDED)]
        return unescaped(self.text(node))

    def _substitution(self, node: Node) -> list[Piece]:
        text = self.text(node)
        parts = _BACKTICK.split(text)
        if len(parts) <= 3 or not text.startswith("`"):
            return [Piece(_shown(self.substitute(node)), Kind.EXPANDED)]
        # `a` `b` in one command: the parser takes all between the first and the last for one.
        return [
            Piece(_shown(self.evaluate(_IN_BACKTICKS.sub(r"\1", part))) if at % 2 else part, Kind.EXPANDED)
            for at, part in enumerate(parts)
        ]

    def _concatenation(self, children: Iterable[Node], start: int, end: int) -> list[Piece]:
        pieces, at = [], start
        for child in children:
            pieces += unescaped(self._between(at, child.start_byte)) if at < child.start_byte else []
            # Bash does braces before variables: $x{1,2} is $x1 and $x2.
            lost = (
                child.type == "simple_expansion" and self.source[child.end_byte : child.end_byte + 1] == b"{"
            )
            pieces += [Piece(UNKNOWN, Kind.QUOTED)] if lost else self.pieces(child)
            at = child.end_byte
        return pieces + (unescaped(self._between(at, end)) if at < end else [])

    def _is_list(self, node: Node) -> bool:
        return self.text(node) in ("$@", "${@}") or bool(re.fullmatch(r"\$\{\w+\[@\]\}", self.text(node)))

    def _parameter(self, node: Node) -> str:
        self._look_within(node)
        match = _PARAMETER.fullmatch(self.text(node))
        if match is None:
            return UNKNOWN
        indirect, name, subscript, operator, _ = match.groups()
        if subscript:
            name += "[@]" if subscript[1:-1] in _LISTS else "" if subscript == "[0]" else subscript
        value = self.lookup(name)
        if indirect:
            value = self.lookup(value) if re.fullmatch(r"[A-Za-z_]\w*", value) else UNKNOWN
        if not operator:
            return value
        operand = self._operand(node, operator)
        if UNKNOWN in value or (operator[0] in "#%" and UNKNOWN in operand):
            return UNKNOWN
        if operator[0] in "#%":
            return trimmed(value, operator, operand)
        if operator[-1] == "=" and not value:
            self.assign(name, operand)
        if operator[-1] in "-=":
            return value or operand
        if operator[-1] == "+":
            return operand if value else ""
        if not value:  # `?` ends the shell then, so whoever goes on has one
            self.assign(name, UNKNOWN)
        return value or UNKNOWN

    def _operand(self, node: Node, operator: str) -> str:
        """The word after the operator."""
        children = node.children
        at = next((at for at, child in enumerate(children) if child.type == operator), None)
        if at is None:
            return UNKNOWN
        start, end = children[at].end_byte, children[-1].start_byte
        return value_of(self._concatenation(children[at + 1 : -1], start, end), self.lookup("HOME"))

    def _look_within(self, node: Node) -> None:
        """Have the commands seen that stand somewhere in there."""
        for child in node.named_children:
            if child.type in ("command_substitution", "process_substitution"):
                self.substitute(child)
            else:
                self._look_within(child)

    def _between(self, start: int, end: int) -> str:
        return self.source[start:end].decode(errors="surrogateescape")


def _shown(printed: str | None) -> str:
    return UNKNOWN if printed is None else printed.rstrip("\n")
