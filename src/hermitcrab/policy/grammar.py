"""What commands a text of bash would run, found by reading it: tree-sitter parses, nothing is executed.

`read` goes through the text as bash would, with the variables and the directory that it knows, through
wrappers (`sudo`, `xargs`, `bash -c`, ...), substitutions, pipes and functions. What it cannot know stays
unknown; what it cannot parse is read roughly. It never raises, and its work is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from hermitcrab.policy.arguments import SHELLS
from hermitcrab.policy.invocations import MOST_COMMANDS
from hermitcrab.policy.reader import LONGEST, Reader
from hermitcrab.policy.scene import Command, Reading, Scene, Scope

__all__ = ["Command", "Reading", "Scene", "read"]

_LONGEST_LINE = 1 << 12
_NOTHING_KNOWN = Scene()


def read(text: str, scene: Scene = _NOTHING_KNOWN, relevant: Callable[[str], bool] = bool) -> Reading:
    """The commands of a text. Of a very long one, those in the lines that are `relevant`."""
    reading = Reading()
    for part in _lines(text, relevant) if _is_too_much(text) else [text]:
        reader = Reader(reading, Scope.of(scene), scene.aliases)
        try:
            reader.text(part, at=0 if part is text else None)
        except RecursionError:
            reader.roughly(part)
    return reading


_TANGLE = {"|": 1500, ")": 5000, "${": 2000, "<<": 2000}
"""How many of these a text may have: where they make no sense, the parser takes quadratic time over them."""


def _is_too_much(text: str) -> bool:
    return len(text) > LONGEST or any(text.count(mark) > most for mark, most in _TANGLE.items())


_DOCUMENT = re.compile(r"<<-?[ \t]*['\"\\]?(\w+)")
_SHELL = re.compile(rf"\b(?:{'|'.join(SHELLS)})\b")


def _lines(text: str, relevant: Callable[[str], bool]) -> Iterator[str]:
    """The lines that matter, but for those of here-documents that no shell reads."""
    found, document = 0, ""
    for line in text.split("\n"):
        if document:
            document = "" if line.strip() == document else document
            continue
        line = line[:_LONGEST_LINE]
        if (start := _DOCUMENT.search(line)) and not _SHELL.search(line):
            document = start[1]
        if relevant(line):
            found += 1
            if found > MOST_COMMANDS:
                return
            yield line
