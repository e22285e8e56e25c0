"""What a shell said of its state: bytes to values. Whatever it says is hostile until it is parsed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from hermitcrab.core.farewell import DUMP_BEGIN, DUMP_END, NO_DIRECTORY, PRIVATE, SHIMS
from hermitcrab.core.state import (
    FIXED_SHOPTS,
    NEVER_CARRIED_OPTIONS,
    Function,
    ShellState,
    Variable,
)

_DOUBLE = rb'"(?:[^"\\]|\\.)*"'
_ANSI = rb"\$'(?:[^'\\]|\\.)*'"
_SINGLE = rb"'[^']*'"
_BARE = rb"[^\s\"'()\[\]$\\`;&|<>]+"
_DECLARATION = re.compile(
    rb"declare -([-A-Za-z]+) ([A-Za-z_][A-Za-z0-9_]*)(?:=("
    + rb"|".join((_DOUBLE, _ANSI, _SINGLE, _BARE))
    + rb"|"
    rb"\((?:[^\"'()$\\]|\\.|" + rb"|".join((_DOUBLE, _ANSI, _SINGLE)) + rb")*\)|))?\n",
    re.DOTALL,
)
_ELEMENT = re.compile(
    rb"\[("
    + rb"|".join((_DOUBLE, _ANSI, _SINGLE, rb"[^\]\"'$\\]+"))
    + rb")\]=("
    + rb"|".join((_DOUBLE, _ANSI, _SINGLE, _BARE))
    + rb"|)\s*",
    re.DOTALL,
)
_FUNCTION_LINE = re.compile(rb"declare -f([A-Za-z]*) ([^\n]+)")
# A directory may hold anything, so it comes last; no function's name holds a line break.
_NAMES_AND_PLACE = re.compile(rb"((?:declare -f[^\n]*\n)*)([0-7]{1,4})\n(/.*)\n", re.DOTALL)
_FUNCTION_NAME = re.compile(r"[^\s\0'\"\\$`;&|<>(){}=#*?]+")
_ANSI_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|x([0-9A-Fa-f]{1,2})|c(.)|(.))", re.DOTALL)
_ANSI_LETTERS = {
    b"a": b"\a", b"b": b"\b", b"e": b"\x1b", b"E": b"\x1b", b"f": b"\f",
    b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v",
}  # fmt: skip
_DOUBLE_ESCAPE = re.compile(rb"\\([$`\"\\\n])")
_REFERENCE_TARGET = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\[[0-9]+\])?")
_KNOWN_ATTRIBUTES = frozenset("aAilnruxc")
"""Not t, which means nothing for a variable and is our own mark (see `UNCOVER` in farewell.py)."""

NOT_CAPTURED = frozenset(
    [
        "BASH",
        "BASHOPTS",
        "BASHPID",
        "BASH_ALIASES",
        "BASH_ARGC",
        "BASH_ARGV",
        "BASH_ARGV0",
        "BASH_CMDS",
        "BASH_COMMAND",
        "BASH_EXECUTION_STRING",
        "BASH_LINENO",
        "BASH_MONOSECONDS",
        "BASH_REMATCH",
        "BASH_SOURCE",
        "BASH_SUBSHELL",
        "BASH_TRAPSIG",
        "BASH_VERSINFO",
        "BASH_VERSION",
        "COMP_WORDBREAKS",
        "COPROC",
        "DIRSTACK",
        "EPOCHREALTIME",
        "EPOCHSECONDS",
        "EUID",
        "FUNCNAME",
        "GROUPS",
        "HISTCMD",
        "HOSTTYPE",
        "LINENO",
        "MACHTYPE",
        "OLDPWD",
        "OPTARG",
        "OPTERR",
        "OPTIND",
        "OSTYPE",
        "PIPESTATUS",
        "POSIXLY_CORRECT",
        "PPID",
        "PWD",
        "RANDOM",
        "READLINE_LINE",
        "READLINE_POINT",
        "SECONDS",
        "SHELLOPTS",
        "SHLVL",
        "SRANDOM",
        "UID",
        "_",
    ]
)
"""What bash makes anew for itself; carrying it over would be wrong or impossible."""

# Lines that differ after every command. Left out, an unchanged state is recognised without parsing it.
_VOLATILE = tuple(
    f"declare {flags} {name}".encode()
    for flags in ("--", "-i", "-ir", "-a")
    for name in (
        "_=", "PIPESTATUS=", "PPID=", "SECONDS=", "RANDOM=", "SRANDOM=", "BASHPID=", "EPOCH", "LINENO=",
        "BASH_COMMAND=", PRIVATE,
    )
)  # fmt: skip


class DamagedDump(Exception):
    """The shell's account of its state is incomplete or nonsense; the session keeps the one it has."""


class NoDirectory(Exception):
    """The shell could not enter its directory, and the command was not run."""

    def __init__(self, nearest: str) -> None:
        super().__init__(nearest)
        self.nearest = nearest


@dataclass(frozen=True)
class Parsed:
    """A state, and the bytes it was made from: most of them will be the same next time."""

    state: ShellState
    declarations: list[bytes]
    functions: bytes
    verbose: bool = False
    """`set -v` was on at the end, so the output may show a line of ours."""


def parse(
    data: bytes, previous: Parsed | None, *, place: str, trusted: bool, ignore: frozenset[str]
) -> Parsed:
    """The state in a dump; `previous` saves work on what did not change, `ignore` names what is injected."""
    sections = data.split(b"\0")
    if sections[1:2] == [NO_DIRECTORY] and len(sections) >= 3:
        raise NoDirectory(_decode(sections[2]))
    try:
        begin = sections.index(DUMP_BEGIN)
        fields = sections[begin + 1 : begin + 9]
        options, shopts, posix, in_function, oldpwd, declared, names_and_place, functions = fields
    except ValueError:
        raise DamagedDump("it is not complete") from None
    if sections[begin + 9 : begin + 10] != [DUMP_END]:
        raise DamagedDump("it is not complete")
    match = _NAMES_AND_PLACE.fullmatch(names_and_place)
    if match is None:
        raise DamagedDump(f"no umask and directory in {names_and_place[-80:]!r}")
    names, umask, cwd = match.groups()
    lines = declared.split(b"\n")
    function_text = b"\0".join((names, functions, sections[0]))
    base = previous.state if previous else None
    inside = frozenset(in_function.decode(errors="replace").split(" ")) if in_function else None

    if (
        base
        and previous
        and inside is None
        and not posix
        and _same_but_volatile(lines, previous.declarations)
    ):
        variables, aliases = base.variables, base.aliases
    else:
        declarations = _declarations(declared)
        variables = _variables(declarations, posix, base, inside=inside, ignore=ignore)
        aliases = _aliases(declarations)
    same_functions = previous is not None and function_text == previous.functions

    option_names = _words(options)
    state = ShellState(
        cwd=_decode(cwd),
        oldpwd=_decode(oldpwd[1:]) if oldpwd else None,
        variables=variables,
        functions=base.functions if base and same_functions else _functions(names, functions, sections[0]),
        aliases=aliases,
        options=_carried(option_names, base if inside is not None else None),
        shopts=_words(shopts) - FIXED_SHOPTS,
        umask=umask.decode(),
        place=place,
        trusted=trusted,
    )
    if base is not None and state == base:
        state = base
    return Parsed(state, lines, function_text, "verbose" in option_names)


def _same_but_volatile(lines: list[bytes], before: list[bytes]) -> bool:
    return len(lines) == len(before) and all(
        line.startswith(_VOLATILE) for line, old in zip(lines, before, strict=True) if line != old
    )


def _declarations(declared: bytes) -> dict[str, re.Match[bytes]]:
    found: dict[str, re.Match[bytes]] = {}
    at = 0
    while match := _DECLARATION.match(declared, at):
        at = match.end()
        found[match[2].decode()] = match
    if at != len(declared):
        raise DamagedDump(f"cannot read {declared[at : at + 80]!r}")
    return found


def _variables(
    declarations: Mapping[str, re.Match[bytes]],
    posix: bytes,
    base: ShellState | None,
    *,
    inside: frozenset[str] | None,
    ignore: frozenset[str],
) -> Mapping[str, Variable]:
    known = base.variables if base else {}
    found: dict[str, Variable] = {}
    for name, match in declarations.items():
        if name in NOT_CAPTURED or name in ignore or name.startswith(PRIVATE):
            continue
        variable = _variable(match[1], match[3])
        if variable is None:
            continue
        if inside is not None and (name in inside or variable.value is None):
            # The shell ended within a function, and this may be its local: see `UNCOVER` in farewell.py.
            if name in known:
                found[name] = known[name]
            continue
        # The same object for the same value, so that comparing states is cheap.
        before = known.get(name)
        found[name] = before if before == variable and before is not None else variable
    if inside is not None:
        found |= {name: known[name] for name in ("POSIXLY_CORRECT",) if name in known}
    elif posix:
        letters, _, value = _decode(posix).partition("=")
        found["POSIXLY_CORRECT"] = Variable(value, "x" if "x" in letters else "")
    if base is not None and len(found) == len(known) and all(found[n] is known.get(n) for n in found):
        return known
    return MappingProxyType(found)


def _variable(flags: bytes, raw: bytes | None) -> Variable | None:
    attributes = "".join(sorted(set(flags.decode()) & _KNOWN_ATTRIBUTES))
    if raw is None:
        return Variable(None, attributes)
    if raw.startswith(b"("):
        pairs = _elements(raw)
        if "A" not in attributes and not all(subscript.isdigit() for subscript, _ in pairs):
            return None
        if "A" in attributes:
            return Variable(tuple(sorted(pairs)), attributes)  # bash has no order for these
        return Variable(pairs, attributes if "a" in attributes else attributes + "a")
    value = _decode(unquote(raw))
    if "n" in attributes and not _REFERENCE_TARGET.fullmatch(value):
        return None  # a reference to an expression would be evaluated wherever it is used
    return Variable(value, attributes)


def _elements(raw: bytes) -> tuple[tuple[str, str], ...]:
    pairs: list[tuple[str, str]] = []
    at = 1
    while match := _ELEMENT.match(raw, at):
        at = match.end()
        pairs.append((_decode(unquote(match[1])), _decode(unquote(match[2]))))
    if at != len(raw) - 1:
        raise DamagedDump(f"cannot read the array {raw[at : at + 80]!r}")
    return tuple(pairs)


def unquote(word: bytes) -> bytes:
    """The bytes that a quoted word of bash's own output stands for."""
    if word.startswith(b'"'):
        return _DOUBLE_ESCAPE.sub(rb"\1", word[1:-1])
    if word.startswith(b"$'"):
        return _ANSI_ESCAPE.sub(_unescape, word[2:-1])
    if word.startswith(b"'"):
        return word[1:-1]
    return word


def _unescape(match: re.Match[bytes]) -> bytes:
    octal, hexadecimal, control, letter = match.groups()
    if octal:
        return bytes([int(octal, 8) & 0xFF])
    if hexadecimal:
        return bytes([int(hexadecimal, 16)])
    if control:
        return bytes([control[0] & 0x1F])
    return _ANSI_LETTERS.get(letter, letter)


def _functions(names: bytes, text: bytes, before: bytes) -> Mapping[str, Function]:
    """Bash prints the functions in the order of `names`, each with a header line of its own.

    A function called `builtin` comes apart, `before` the rest, as the shell had to be rid of it.
    """
    headers = [(match[2], match[1]) for match in _FUNCTION_LINE.finditer(names)]
    at = before.rfind(b"builtin () \n{")  # behind what a DEBUG trap may have printed
    if at >= 0:
        headers.insert(0, (b"builtin", b""))
        text = before[at:].removesuffix(b"\n") + b"\n" + text
    text = b"\n" + text
    starts: list[int] = []
    for header, _ in headers:
        starts.append(text.find(b"\n" + header + b" () \n", starts[-1] if starts else 0))
        if starts[-1] < 0:
            raise DamagedDump(f"the function {header!r} is missing")
    found: dict[str, Function] = {}
    for index, (raw_name, flags) in enumerate(headers):
        name = _decode(raw_name)
        end = starts[index + 1] if index + 1 < len(starts) else len(text)
        body = text[starts[index] + len(raw_name) + len(b"\n () \n") : end].removesuffix(b"\n")
        if not _FUNCTION_NAME.fullmatch(name) or name.startswith(PRIVATE) or not body.startswith(b"{"):
            continue
        # An exported function is followed by a `declare -fx` line of its own.
        body = body.removesuffix(b"\ndeclare -f" + flags + b" " + raw_name) if flags else body
        function = Function(_decode(body), "".join(sorted(set(flags.decode()) & set("xrt"))))
        if not (name in SHIMS and PRIVATE in function.body):
            found[name] = function
    return MappingProxyType(found)


def _aliases(declarations: Mapping[str, re.Match[bytes]]) -> Mapping[str, str]:
    match = declarations.get("BASH_ALIASES")
    return MappingProxyType(dict(_elements(match[3]) if match and match[3] else ()))


def _carried(names: frozenset[str], before: ShellState | None) -> frozenset[str]:
    """The options to remember; where locals are in sight, POSIX mode may be the doing of one of them."""
    carried = names - NEVER_CARRIED_OPTIONS
    if before is None:
        return carried
    return carried - {"posix"} | (before.options & {"posix"})


@lru_cache(maxsize=64)
def _words(section: bytes) -> frozenset[str]:
    return frozenset(
        word for word in section.decode(errors="replace").split(":") if re.fullmatch("[a-z0-9_-]+", word)
    )


def _decode(data: bytes) -> str:
    return data.decode(errors="surrogateescape")
