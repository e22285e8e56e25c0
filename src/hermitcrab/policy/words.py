"""A word of bash, as far as it can be known without running anything. Pure functions.

A word is made of pieces: what was written, what was quoted, what a variable or substitution gave. From these
come the words that bash would make: braces, tilde and splitting done, quotes gone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from fnmatch import translate
from typing import NamedTuple

UNKNOWN = "\0"
"""Stands in a text for what cannot be known; no text of a shell has this character."""
_MOST_WORDS = 64
_MOST_BRACES = 16
_GLOB = frozenset("*?[")


class Word(NamedTuple):
    """One word of a command."""

    text: str
    """Without its quotes, and with `UNKNOWN` wherever something unknown stands."""
    start: int = -1
    """Where its source begins, in bytes; -1 when it is not in the text that was read."""
    end: int = -1
    pattern: bool = False
    """Bash takes `*`, `?` or `[` in it for a pattern of file names."""
    bare: bool = False
    """Written without quotes, backslashes or expansions, so that an alias or a keyword can be meant."""

    @property
    def known(self) -> bool:
        return UNKNOWN not in self.text


class Kind(Enum):
    """What bash still does with a piece of a word."""

    PLAIN = 0
    """Written as it is: braces, tilde and patterns count."""
    QUOTED = 1
    """Nothing counts."""
    EXPANDED = 2
    """Came from an expansion without quotes: is split, and patterns count."""


class Piece(NamedTuple):
    text: str
    kind: Kind


def words_of(pieces: Sequence[Piece], home: str, start: int = -1, end: int = -1) -> list[Word]:
    """The words that bash makes of one word as it was written; mostly one, perhaps none."""
    bare = len(pieces) == 1 and pieces[0].kind is Kind.PLAIN
    found = []
    for alternative in _with_braces(pieces):
        for fields in _split(_with_tilde(alternative, home)):
            text = "".join(piece.text for piece in fields)
            pattern = any(piece.kind is not Kind.QUOTED and _GLOB & set(piece.text) for piece in fields)
            found.append(Word(text, start, end, pattern, bare))
    return found[:_MOST_WORDS]


def value_of(pieces: Sequence[Piece], home: str) -> str:
    """What a variable is given by an assignment: not split, no braces."""
    return "".join(piece.text for piece in _with_tilde(pieces, home))


def unescaped(text: str) -> list[Piece]:
    """Unquoted source: what follows a backslash is quoted by it."""
    if "\\" not in text:
        return [Piece(text, Kind.PLAIN)]
    pieces = []
    for plain, escaped in re.findall(r"([^\\]+)|\\(.?)", text, re.DOTALL):
        if plain:
            pieces.append(Piece(plain, Kind.PLAIN))
        elif escaped != "\n":
            pieces.append(Piece(escaped or "\\", Kind.QUOTED))
    return pieces


def in_double_quotes(text: str) -> str:
    return re.sub(r'\\([$`"\\])|\\\n', lambda match: match[1] or "", text)


_SIMPLE_ESCAPES = dict(zip("abeEfnrtv\\'\"?", "\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,2})|u([0-9A-Fa-f]{1,4})|U([0-9A-Fa-f]{1,8})|([0-7]{1,3})|c(.)|(.))", re.DOTALL
)


def ansi_c(text: str) -> str:
    """The inside of `$'...'`. Bytes of hexadecimal and octal escapes are put together as UTF-8."""

    def replaced(match: re.Match[str]) -> str:
        byte, short, long, octal, control, other = match.groups()
        if byte or octal:
            return bytes([int(byte, 16) if byte else int(octal, 8) & 0xFF]).decode(errors="surrogateescape")
        if short or long:
            code = int(short or long, 16)
            return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else UNKNOWN
        if control:
            return chr(ord(control) & 0x1F)
        return _SIMPLE_ESCAPES.get(other, "\\" + other)

    result = _ESCAPE.sub(replaced, text)
    end = result.find("\0")  # bash ends the string at a NUL
    result = result if end < 0 else result[:end]
    return result.encode(errors="surrogateescape").decode(errors="surrogateescape")


def trimmed(value: str, operator: str, pattern: str) -> str:
    """`${x#pattern}`, `##`, `%` and `%%`."""
    matches = re.compile(translate(pattern)).match
    lengths = range(len(value) + 1)
    if operator[0] == "#":
        cuts = ((value[:at], value[at:]) for at in (lengths if operator == "#" else reversed(lengths)))
    else:
        cuts = ((value[at:], value[:at]) for at in (reversed(lengths) if operator == "%" else lengths))
    return next((rest for gone, rest in cuts if matches(gone)), value)


def _with_tilde(pieces: Sequence[Piece], home: str) -> Sequence[Piece]:
    if not pieces or pieces[0].kind is not Kind.PLAIN or not pieces[0].text.startswith("~"):
        return pieces
    at = re.search("[/:]|$", pieces[0].text)
    assert at is not None
    user, rest = pieces[0].text[1 : at.start()], pieces[0].text[at.start() :]
    if not rest and len(pieces) > 1:
        return pieces if pieces[1].kind is Kind.QUOTED else [Piece(UNKNOWN, Kind.QUOTED), *pieces[1:]]
    if not user:
        place = home
    elif re.fullmatch(r"[a-z_][\w-]*", user):
        place = "/root" if user == "root" else f"/home/{user}"
    else:
        return pieces
    return [Piece(place, Kind.QUOTED), Piece(rest, Kind.PLAIN), *pieces[1:]]


def _split(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Fields, cut where an expansion gave white space. Without quotes, what is empty is no word."""
    field: list[Piece] = []
    for piece in pieces:
        if piece.kind is not Kind.EXPANDED:
            field.append(piece)
            continue
        first, *others = re.split(r"[ \t\n]+", piece.text)
        if first:
            field.append(Piece(first, Kind.EXPANDED))
        for other in others:
            if field:
                yield field
            field = [Piece(other, Kind.EXPANDED)] if other else []
    if field:
        yield field


def _with_braces(pieces: Sequence[Piece]) -> list[Sequence[Piece]]:
    braces = sum(piece.text.count("{") for piece in pieces if piece.kind is Kind.PLAIN)
    if not 0 < braces <= _MOST_BRACES:
        return [pieces]
    # Text that no brace can be in is one letter here.
    letters: list[Piece] = []
    for piece in pieces:
        letters += [Piece(c, Kind.PLAIN) for c in piece.text] if piece.kind is Kind.PLAIN else [piece]
    return [_joined(each) for each in _braces(letters, depth=0)]


def _joined(letters: Iterable[Piece]) -> list[Piece]:
    pieces: list[Piece] = []
    for letter in letters:
        if pieces and pieces[-1].kind is letter.kind is Kind.PLAIN:
            pieces[-1] = Piece(pieces[-1].text + letter.text, Kind.PLAIN)
        else:
            pieces.append(letter)
    return pieces


def _braces(letters: list[Piece], depth: int) -> list[list[Piece]]:
    """Every word that the first pair of braces makes, with the others in it done too."""
    for at, letter in enumerate(letters):
        if letter != ("{", Kind.PLAIN) or (at and letters[at - 1] == ("$", Kind.PLAIN)) or depth > 8:
            continue
        alternatives, end = _alternatives(letters, at)
        if alternatives is None:
            continue
        before = letters[:at]
        after = _braces(letters[end:], depth + 1)
        middle = [word for each in alternatives for word in _braces(each, depth + 1)]
        return [before + word + rest for word in middle for rest in after][:_MOST_WORDS]
    return [letters]


def _alternatives(letters: list[Piece], opening: int) -> tuple[list[list[Piece]] | None, int]:
    """What stands between the commas of the braces that open there, and where these end."""
    parts: list[list[Piece]] = [[]]
    level = 0
    for at in range(opening + 1, len(letters)):
        text, kind = letters[at]
        mark = text if kind is Kind.PLAIN else ""
        if mark == "}" and level == 0:
            if len(parts) > 1:
                return parts, at + 1
            return _range("".join(letter.text for letter in parts[0])), at + 1
        if mark == "," and level == 0:
            parts.append([])
            continue
        level += (mark == "{") - (mark == "}")
        parts[-1].append(letters[at])
    return None, opening


def _range(text: str) -> list[list[Piece]] | None:
    match = re.fullmatch(r"(-?\d{1,9})\.\.(-?\d{1,9})(?:\.\.(-?\d{1,9}))?|([A-Za-z])\.\.([A-Za-z])", text)
    if not match:
        return None
    if match[4]:
        first, last, show = ord(match[4]), ord(match[5]), chr
    else:
        width = max(len(match[1]), len(match[2])) if re.search(r"(^|\.|-)0\d", text) else 0
        first, last = int(match[1]), int(match[2])
        show = lambda number: f"{number:0{width}d}"  # noqa: E731
    step = abs(int(match[3] or 1)) or 1
    numbers = range(first, last + 1, step) if first <= last else range(first, last - 1, -step)
    return [[Piece(show(number), Kind.PLAIN)] for number in numbers[:_MOST_WORDS]]
