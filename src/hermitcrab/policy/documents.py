"""What the parser does not understand, taken out of a text before it is parsed.

It gets lost in here-documents as soon as anything follows `<<E` on its line. In their place it finds a plain
redirection from a file, at the same bytes, and blanks where the documents were. And it takes a line that
begins with a backslash, such as `\\rm x`, for the end of the line before, does not know that `!` and
`time` can stand before `if` and the like, and takes the last words of `[ -d / ]` and `echo ==` for operators.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TOKEN = re.compile(
    rb"""
      \\.                                       # something escaped
    | '[^']*'                                   # quotes without anything to run in them
    | \$'(?:[^'\\]|\\.)*'
    | (?:(?<![^\s;&|()])|\A)\#[^\n]*            # a comment
    | \$?\(\((?:[^()]|\([^()]*\))*\)\)          # arithmetic, where << is a shift
    | (?P<string><<<)
    | (?P<start><<(?P<dash>-?)[\ \t]*(?P<word>(?:\\.|'[^'\n]*'|"[^"\n]*"|[^\s;&|<>()'"\\`])+))
    | (?P<prefix>(?<![^\s;&|({])(?:!|time|coproc)(?:[\ \t]+-p)?(?=[\ \t]+
          (?:(?:if|for|while|until|case|select|!|\{|\[\[)[\ \t\n]|\()))
    | (?P<lone>(?<=[\ \t])(?:[-+*/%~!^]{1,2}(?=[\ \t]+\])|(?:==|=~)(?=[\s;&|)]|\Z)))
    | (?P<turn>["()\n])
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(rb"""\\.|(?P<turn>"|\$\((?!\())""", re.DOTALL)
_ODD = re.compile(rb"<<|\n[ \t]*\\|![ \t]|time[ \t]|coproc[ \t]|[-+*/%~!^][ \t]+\]|[ \t]=[=~]")
_ESCAPED_START = re.compile(rb"\n[ \t]*\\(?=\w)")
_FILLER = b"\x01"
_LONGEST_TEST = 1000


class Document(NamedTuple):
    """What a command is given as its stdin."""

    start: int
    """Where its first line begins, in bytes."""
    text: bytes
    literal: bool
    """Nothing in it is expanded."""


class Bare(NamedTuple):
    """A text that can be parsed, each byte at its place."""

    source: bytes
    documents: dict[int, Document]
    """By where the redirection stands in the source."""
    strings: frozenset[int]
    """Where the redirections stand that were `<<<`; the word behind each is the stdin."""


def simplified(source: bytes) -> Bare:
    if not _ODD.search(source):
        return Bare(source, {}, frozenset())
    bare = bytearray(source)
    documents: dict[int, Document] = {}
    strings = set()
    waiting: list[re.Match[bytes]] = []
    at = 0
    inside: list[bytes] = []
    while token := (_IN_QUOTES if inside[-1:] == [b'"'] else _TOKEN).search(source, at):
        at, kinds = token.end(), token.groupdict()
        if kinds.get("string"):
            strings.add(token.start())
            bare[token.start() : at] = b"<  "
        elif kinds.get("prefix"):
            bare[token.start() : at] = b" " * (at - token.start())
        elif lone := kinds.get("lone"):
            if (lone[:1] == b"=") != _is_in_a_test(source, token.start()):
                bare[token.start() : at] = b"_" * len(lone)
        elif kinds.get("start"):
            waiting.append(token)
            bare[token.start() : at] = b"<" + _FILLER * (at - token.start() - 1)
        elif token["turn"] == b"\n":
            if escaped := _ESCAPED_START.match(source, token.start()):
                bare[escaped.end() - 1] = ord(" ")
            for start in waiting:
                document, end = _document(source, at, start)
                documents[start.start()] = document
                bare[at:end] = re.sub(rb"[^\n]", b" ", source[at:end])
                at = end
            waiting.clear()
        elif token["turn"]:
            _turn(inside, token["turn"])
    return Bare(bytes(bare), documents, frozenset(strings))


def _is_in_a_test(source: bytes, at: int) -> bool:
    before = source[max(0, at - _LONGEST_TEST) : at].replace(b"\t", b" ")
    return before.rfind(b"[ ") > before.rfind(b" ]")


def _turn(inside: list[bytes], mark: bytes) -> None:
    """Keep count of double quotes and parentheses: in `"$(...)"` there are commands again."""
    if mark == b")" or (mark == b'"' and inside[-1:] == [b'"']):
        if inside[-1:] == [b'"' if mark == b'"' else b"("]:
            inside.pop()
    else:
        inside.append(mark[-1:])


def _document(source: bytes, begin: int, start: re.Match[bytes]) -> tuple[Document, int]:
    """The document that begins there, and where what follows it begins."""
    word = re.sub(rb"""\\(.)|['"]""", rb"\1", start["word"], flags=re.DOTALL)
    literal = word != start["word"]
    at = begin
    while at < len(source):
        end = source.find(b"\n", at) + 1 or len(source)
        line = source[at:end].removesuffix(b"\n")
        if (line.lstrip(b"\t") if start["dash"] else line) == word:
            return Document(begin, source[begin:at], literal), end
        at = end
    return Document(begin, source[begin:], literal), len(source)
