"""What a few commands do that matters to whoever reads on: to the directory, to variables, to a pipe."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from hermitcrab.policy.arguments import arguments
from hermitcrab.policy.words import UNKNOWN, Word, ansi_c

_MOST_ITEMS = 64
EVERYTHING = re.compile(r"\*+|\?\*|\.\*|\.\[!?\^?\.\]\*|\.\?\?\*|\[!?\^?\.\]\*|\*\.\*|\.\.?")
"""The last part of a path that means all of the directory before it."""


class Scope(Protocol):
    cwd: str
    variables: dict[str, str]
    complete: bool

    def lookup(self, name: str) -> str: ...
    def parameters(self, words: Sequence[str] | None) -> None: ...


def changes(name: str, words: Sequence[Word], scope: Scope) -> None:
    """What a builtin does to the shell that runs it."""
    match name:
        case "cd" | "pushd":
            scope.cwd = _directory(arguments(words).operands, scope)
        case "popd":
            scope.cwd = UNKNOWN
        case "source" | ".":
            scope.complete = False
        case "set" if nounset(words):
            scope.complete = False
        case "set":
            if "--" in [word.text for word in words]:
                at = [word.text for word in words].index("--")
                scope.parameters([word.text for word in words[at + 1 :]])
            elif words and not words[0].text.startswith(("-", "+")):
                scope.parameters([word.text for word in words])
        case "shift":
            scope.parameters(None)
        case "read" | "mapfile" | "readarray" | "getopts" | "wait" | "let":
            names = [re.split(r"[^\w]", word.text)[0] for word in words]
            scope.variables |= {name: UNKNOWN for name in names if name.isidentifier()}
        case "printf" if words and words[0].text.startswith("-v"):
            target = words[0].text[2:] or (words[1].text if len(words) > 1 else "")
            scope.variables[target] = UNKNOWN


def nounset(words: Sequence[Word]) -> bool:
    """`set -u`: whoever goes on has not used a variable that is not set."""
    given = arguments(words, "o", mixed=False)
    return given.has("u") or given.options.get("o") == "nounset"


def _directory(operands: Sequence[Word], scope: Scope) -> str:
    target = operands[0].text if operands else scope.lookup("HOME")
    if target == "-" or (operands and operands[0].pattern) or not target:
        return UNKNOWN if target else scope.cwd
    whole = posixpath.join(scope.cwd, target)
    return UNKNOWN if UNKNOWN in whole else posixpath.normpath(whole)


def printed(name: str, words: Sequence[Word], stdin: str | None, scope: Scope) -> str | None:
    """What it writes to its stdout, where that can be known."""
    texts = [word.text for word in words]
    if name in ("ls", "find"):
        return _names(name, words)
    if any(word.pattern for word in words):
        return None
    if name == "echo":
        escapes = False
        while texts and re.fullmatch("-[neE]+", texts[0]):
            escapes = "e" in texts.pop(0) or escapes
        return (ansi_c(" ".join(texts)) if escapes else " ".join(texts)) + "\n"
    if name == "printf" and texts:
        return _formatted(texts[0], texts[1:])
    if name == "pwd":
        return scope.cwd + "\n"
    if name == "whoami" or (name == "id" and texts and set(texts) <= {"-u", "-n", "-un", "-nu"}):
        return (scope.lookup("USER") or UNKNOWN) + "\n"  # by name or by number, it is the same user
    if name == "which" or (name == "command" and texts[:1] == ["-v"]):
        return "".join(f"/usr/bin/{text}\n" for text in texts if not text.startswith("-"))
    if name == "ps":
        return "1 -1\n" if _shows_all(texts) else None  # as `kill -1` means all of them
    if name == "awk" and len(texts) == 1 and re.fullmatch(r"\s*\{\s*print \$\d\s*\}\s*", texts[0]):
        return stdin
    if name in ("cat", "tee") and not [text for text in texts if text != "-"]:
        return stdin
    return "" if name in (":", "true", "cd", "export", "set") else None


class Search(NamedTuple):
    """What a `find` looks for."""

    places: Sequence[Word]
    everything: bool
    """No test picks out some of what is there."""
    actions: Sequence[str]
    """`-delete`, and the words of what `-exec` runs."""


_NO_CHOICE = ("-type", "-mindepth", "-maxdepth", "-xtype", "-user", "-fstype")
_SAYS_NOTHING = ("-depth", "-xdev", "-mount", "-print", "-print0", "-true", "-a", "-and", "-d")


def search(words: Sequence[Word]) -> Search:
    texts = [word.text for word in words]
    starts = [at for at, text in enumerate(texts) if text.startswith(("-", "(", "!"))]
    first = next((at for at in starts if texts[at] not in ("-H", "-L", "-P")), len(texts))
    places = [word for word in words[:first] if not word.text.startswith("-")] or [Word(".")]
    everything, actions, rest = True, [], iter(texts[first:])
    for text in rest:
        if text == "-delete":
            actions.append(text)
        elif text in ("-exec", "-execdir", "-ok", "-okdir"):
            for word in rest:
                if word in (";", "+"):
                    break
                actions.append(posixpath.basename(word))
        elif text in _NO_CHOICE:
            next(rest, None)
        elif text in ("-name", "-path", "-iname"):
            everything = everything and EVERYTHING.fullmatch(next(rest, "")) is not None
        else:
            everything = everything and text in _SAYS_NOTHING
    return Search(places, everything, actions)


def _names(name: str, words: Sequence[Word]) -> str | None:
    """What `ls` or `find` prints, as a pattern."""
    if name == "find":
        sought = search(words)
        plain = sought.everything and not sought.actions
        return "".join(f"{place.text}/*\n" for place in sought.places) if plain else None
    given = arguments(words)
    if given.options.keys() - set("1aAd"):
        return None
    return "".join(f"{word.text}\n" for word in given.operands) if given.has("d") else "*\n"


def _shows_all(texts: Sequence[str]) -> bool:
    """Whether `ps` shows every process."""
    letters = set(texts[0]) if texts else set()
    return {"a", "x"} <= letters or any(re.match(r"-\w*[eA]", text) for text in texts)


def _formatted(form: str, values: list[str]) -> str | None:
    """`printf` of strings; of anything else nothing is known."""
    if form.startswith("-") or re.search(r"%[^s%]", form):
        return None
    count = len(re.findall(r"%s", form))
    rounds = max(1, -(-len(values) // count)) if count else 1
    rest = iter(values)
    return "".join(
        re.sub(r"%([s%])", lambda match: next(rest, "") if match[1] == "s" else "%", ansi_c(form))
        for _ in range(min(rounds, _MOST_ITEMS))
    )


def commands_within(name: str, words: Sequence[Word], stdin: str | None) -> Iterator[list[Word]]:
    """The commands that `xargs` and `find` make of their arguments."""
    if name in ("xargs", "parallel"):
        yield from _of_xargs(words, stdin)
    elif name == "find":
        yield from _of_find(words)


def _of_xargs(words: Sequence[Word], stdin: str | None) -> Iterator[list[Word]]:
    valued, long_valued = "adEeIiLlnPsj", ("arg-file", "delimiter", "max-args", "max-procs", "replace")
    given = arguments(words, valued, long_valued, mixed=False)
    items = [Word(UNKNOWN)] if stdin is None else [Word(each) for each in re.split(r"[\s\0]+", stdin) if each]
    command = list(given.operands) or [Word("echo")]
    place = given.options.get("I") or given.options.get("replace")
    if place:
        for item in items[:_MOST_ITEMS]:
            yield [word._replace(text=word.text.replace(place, item.text)) for word in command]
    else:
        yield [*command, *items[:_MOST_ITEMS]]


def _of_find(words: Sequence[Word]) -> Iterator[list[Word]]:
    rest = iter(words)
    for word in rest:
        if word.text in ("-exec", "-execdir", "-ok", "-okdir"):
            command: list[Word] = []
            for part in rest:
                if part.text == ";" or (part.text == "+" and command and command[-1].text == UNKNOWN):
                    break
                command.append(part._replace(text=part.text.replace("{}", UNKNOWN)))
            if command:
                yield command


def texts_within(name: str, words: Sequence[Word]) -> Iterator[str]:
    """Arguments that bash will run as text, now or later."""
    if name == "trap" and words:
        operands = arguments(words, mixed=False).operands
        if len(operands) > 1:
            yield operands[0].text
    elif name == "alias":
        yield from (word.text.partition("=")[2] for word in words)
