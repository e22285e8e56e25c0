"""What a call's output says: the program's own output, its status, its files. Pure."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from contextlib import suppress

from hermitcrab.core.dump import unquote
from hermitcrab.core.plain.words import Word, Words

_COMPLAINT_KEPT = 4096
_PIECE = re.compile(rb" (\$'(?:[^'\\]|\\.)*'|(?:[^ \\]|\\.)*)", re.DOTALL)


class Answer:
    """What is known of a call from its output so far."""

    def __init__(self, nonce: bytes) -> None:
        self.begun = False
        self.complaint = b""
        """What was printed before our own text spoke."""
        self.status: int | None = None
        self.refused = ""
        """Why the program was not started."""
        self.files: dict[int, bytes] = {}
        """By their channel; those that were told to the end."""
        self.stored: dict[int, bytes] = {}
        """Where in the sandbox those are that are too large to be told."""
        self.done = False
        self._words = Words(nonce, lead=b"")
        self._telling: dict[int, bytearray] = {}
        self._coding: int | None = None

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The program's own output in it."""
        for piece in self._words.feed(data):
            if isinstance(piece, Word):
                self._heard(piece)
            else:
                yield from self._printed(piece)

    def flush(self) -> Iterator[bytes]:
        """The rest, when nothing more comes."""
        yield from self._printed(self._words.flush())

    def _printed(self, data: bytes) -> Iterator[bytes]:
        if not self.begun:
            self.complaint = (self.complaint + data)[:_COMPLAINT_KEPT]
        elif self._coding is not None:
            self._keep(self._coding, data)
        elif self.status is None and data:
            yield data

    def _heard(self, word: Word) -> None:
        match word.name:
            case "begin":
                self.begun = True
            case "no":
                self.refused = word.rest.decode(errors="replace")
            case "end":
                self.status = int(word.rest)
            case "file":
                channel, _, piece = word.rest.partition(b" ")
                self._keep(int(channel), piece)
            case "last":
                self.files[int(word.rest)] = _unquoted(self._taken(word))
            case "coded":
                self._coding = int(word.rest)
            case "decoded":
                self._coding = None
                # Somebody in the background may have printed in between.
                with suppress(binascii.Error):
                    self.files[int(word.rest)] = binascii.a2b_base64(
                        self._taken(word).replace(b"\n", b""), strict_mode=True
                    )
            case "stored":
                stored, _, path = word.rest.partition(b" ")
                self.stored[int(stored)] = path
            case "done":
                self.done = True

    def _keep(self, channel: int, data: bytes) -> None:
        content = self._telling.setdefault(channel, bytearray())
        content += data

    def _taken(self, word: Word) -> bytes:
        return bytes(self._telling.pop(int(word.rest), b""))


def _unquoted(text: bytes) -> bytes:
    """What `tell` was given: pieces that a NUL ended, and the one that it added."""
    pieces = [_piece(match[1]) for match in _PIECE.finditer(text)]
    return b"\0".join(pieces)[:-1]


def _piece(word: bytes) -> bytes:
    if word.startswith((b"$'", b"''")):
        return unquote(word)
    return re.sub(rb"\\(.)", rb"\1", word, flags=re.DOTALL)
