"""The bash text around a command: restoring a state, running it, giving the state back. Pure functions.

A shell is started ahead with `bootstrap`, restores the state it was given and waits. When a command comes,
an `order` brings it up to date and sets it on its way; its last words (`farewell.py`) dump the new state.
Everything is one line, so that line numbers in the command are its own; every command word is quoted or goes
through `\\builtin`, because users define functions and aliases of any name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hermitcrab.agent.wire import FdKind, Known
from hermitcrab.core.farewell import EXIT_TRAP, LAST_WORDS, trap_shim
from hermitcrab.core.quoting import encode, quote
from hermitcrab.core.state import LOADER, Function, ShellState, Variable

STDIN_FD = 8
"""Where the command's stdin waits while descriptor 0 is the bootstrap."""
CONTROL_FD = 7
_LATE = re.compile("IFS|TMOUT|POSIXLY_CORRECT|BASH_.*|FUNCNEST|GLOBIGNORE|EXECIGNORE")
"""Variables that change how bash itself reads: restored only after it has read the command."""


def bootstrap(restore: bytes) -> bytes:
    """The whole life of a shell that is started ahead: restore, wait for the tail, run it, dump, exit."""
    quietly = b"{ " + restore + b"} 2>/dev/null; " if restore else b""
    return _with_trap(quietly + _RECEIVE + _SET_TRAP + b'\\builtin eval "$__hc_n"; ' + LAST_WORDS)


def _with_trap(line: bytes) -> bytes:
    """The trap's text follows the line as data, because bash reads it faster than it parses it."""
    trap = EXIT_TRAP.encode()
    return b"\\builtin read -r -N %d __hc_e; \\exec 0<&8 8<&-; " % len(trap) + line + trap


_SET_TRAP = b'\\builtin trap "$__hc_e" EXIT; '
_RECEIVE = b'\\builtin read -r -u 7 __hc_n && \\builtin read -r -N "$__hc_n" -u 7 __hc_n || \\builtin exit; '

RECEIVE_AND_RESTORE = _RECEIVE + b'\\builtin eval "$__hc_n"; '
"""As `restore`, for a state too large for the bootstrap: it comes as a message of its own, first."""


def message(text: bytes) -> bytes:
    """What the waiting shell reads: the length, then the text."""
    return b"%d\n" % len(text) + text


def order(changes: bytes, preparation: bytes, state: ShellState, command: str) -> bytes:
    """The message that takes a shell from the state it was started with to the end of the command.

    It first says that it has begun: a shell that dies before that can be replaced.
    """
    begin = b"\\exec 7<&-; { \\builtin printf b >&247; " + changes + preparation + b"} 2>/dev/null; "
    last = state.functions.get(_LAST_FUNCTION)
    if len(command) <= _LONG_COMMAND or last is not None:
        text = command if last is None else f"{definition(_LAST_FUNCTION, last)}\n{command}"
        return message(begin + b"\\builtin eval -- " + quote(text))
    # In a UTF-8 locale bash takes quadratic time over quotes within quotes, so a long command comes as it is.
    raw = encode(command)
    receive = b"LC_ALL=C \\builtin read -r -N %d -u 7 __hc_c; " % len(raw)
    first = LONG_COMMAND_ECHO.replace(b"\\", b"\\\\")
    return message(receive + begin + b'\\builtin eval -- "%s$__hc_c"' % first) + raw


_LONG_COMMAND = 1 << 15
LONG_COMMAND_ECHO = rb"\builtin unset -v __hc_c; \builtin :; "
"""What bash repeats, before the first line of a long command, when that line is no syntax."""


def prepare(
    state: ShellState, fresh: ShellState, *, directory: str, injected: Mapping[str, str], traps: bool
) -> bytes:
    """What is done last before the command, because it would disturb our own text."""
    oldpwd = state.oldpwd if directory == state.cwd else state.cwd
    parts = [
        b"\\builtin cd -P -- %s || { __hc_m=%s; \\builtin exit 126; }" % (quote(directory), quote(directory)),
        b"\\builtin unset -v __hc_e __hc_n" + (b" OLDPWD" if oldpwd is None else b""),
        *([] if oldpwd is None else [b"\\builtin declare -x OLDPWD=" + quote(oldpwd)]),
        *_functions(fresh, state, late=True),
        *_variables(fresh.variables, state.variables, late=True),
        *_declare({name: Variable(value, "x") for name, value in injected.items()}),
        *_options(fresh, state),
        *([b"\\builtin umask " + state.umask.encode()] if state.umask != fresh.umask else []),
        *([trap_shim()] if traps else []),
        *([_aliases(state)] if state.aliases else []),
    ]
    return b"; ".join(parts) + b"; "


def changes(old: ShellState, new: ShellState) -> bytes | None:
    """What makes a shell in state `old` one in state `new`, but for `prepare`; None when nothing can."""
    if old is new:
        return b""
    try:
        parts = [
            *_variables(old.variables, new.variables, late=False),
            *_functions(old, new, late=False),
        ]
    except _CannotChange:
        return None
    return b"; ".join(parts) + b"; " if parts else b""


class _CannotChange(Exception):
    """A readonly variable or function would have to change."""


def _variables(old: Mapping[str, Variable], new: Mapping[str, Variable], *, late: bool) -> Iterable[bytes]:
    if old is new:
        return
    changed = {
        name: variable
        for name, variable in new.items()
        if old.get(name) != variable and bool(_LATE.fullmatch(name)) is late
    }
    gone = [name for name in old.keys() - new.keys() if bool(_LATE.fullmatch(name)) is late]
    unset, unset_references = [], []
    for name in (*gone, *changed):
        before = old.get(name)
        if before is None:
            continue
        if "r" in before.attributes:
            raise _CannotChange
        if "n" in before.attributes:
            unset_references.append(name.encode())
        else:
            unset.append(name.encode())
    if unset:
        yield b"\\builtin unset -v " + b" ".join(unset)
    if unset_references:
        yield b"\\builtin unset -n " + b" ".join(unset_references)
    yield from _declare(changed)


def _declare(variables: Mapping[str, Variable]) -> Iterable[bytes]:
    """Assignments, one command for all variables of the same attributes.

    An array's value is a statement of its own, because behind `\\builtin` bash does not parse one. Attributes
    that would evaluate a value (i, l, u, c) or forbid it (r) come after it.
    """
    first: dict[str, list[bytes]] = {}
    arrays: list[bytes] = []
    last: dict[str, list[bytes]] = {}
    for name, (value, attributes) in variables.items():
        word = name.encode()
        if value is None or not set(attributes) - set("nxr"):
            assignment = b"" if value is None else b"=" + quote(str(value))
            first.setdefault(attributes, []).append(word + assignment)
            continue
        if isinstance(value, str):
            at_once, assignment = attributes.translate(_ONLY_EXPORT), b"=" + quote(value)
        else:
            at_once, assignment = "A" if "A" in attributes else "a", b""
            arrays.append(
                word + b"=(" + b" ".join(b"[%s]=%s" % (quote(at), quote(text)) for at, text in value) + b")"
            )
        first.setdefault(at_once, []).append(word + assignment)
        if set(attributes) - set(at_once):
            last.setdefault(attributes, []).append(word)
    yield from _declarations(first)
    yield from arrays
    yield from _declarations(last)


_ONLY_EXPORT = str.maketrans("", "", "aAilnrtuc")


def _declarations(groups: Mapping[str, list[bytes]]) -> Iterable[bytes]:
    for letters, words in groups.items():
        flags = b"-" + letters.encode() if letters else b"--"
        yield b"\\builtin declare " + flags + b" " + b" ".join(words)


def locale(state: ShellState) -> dict[str, str]:
    """The exported variables that choose the locale."""
    return {name: value for name, value in state.environ.items() if name.startswith(_LOCALE)}


_LOCALE = ("LANG", "LC_")


def environment(state: ShellState, quiet_locale: Mapping[str, str]) -> dict[str, Variable]:
    """What a shell may be started with instead of being told: plain exports that bash does not act on.

    A locale that is missing makes bash complain aloud at its start, so only one that is known not to will do.
    """
    with_locale = locale(state) == quiet_locale
    shell = state.variables.get("SHELL")
    # Without this one bash asks the user database for it at every start; `changes` takes its export back.
    known_shell = {"SHELL": Variable(shell.value, "x")} if shell and isinstance(shell.value, str) else {}
    return known_shell | {
        name: variable
        for name, variable in state.variables.items()
        if variable.attributes == "x"
        and isinstance(variable.value, str)
        and not _LATE.fullmatch(name)
        and name not in LOADER
        and not name.startswith(_LINKER)
        and (with_locale or not name.startswith(_LOCALE))
    }


_LINKER = ("LD_", "DYLD_")
"""What would be loaded into bash itself."""


_LATE_FUNCTIONS = frozenset({"exec"})
"""The bootstrap still needs the real one after it has restored the state."""
_LAST_FUNCTION = "builtin"
"""Everything needs the real one, so it is defined together with the command."""


def definition(name: str, function: Function) -> str:
    # With the keyword, any word can be a function's name.
    return f"function {name} () \n{function.body}"


def _functions(old: ShellState, new: ShellState, *, late: bool) -> Iterable[bytes]:
    if old.functions is new.functions:
        return

    def now(name: str) -> bool:
        return (name in _LATE_FUNCTIONS) is late and name != _LAST_FUNCTION

    gone = [name for name in old.functions.keys() - new.functions.keys() if now(name)]
    changed = {
        name: function
        for name, function in new.functions.items()
        if now(name) and old.functions.get(name) != function
    }
    if any("r" in old.functions[name].attributes for name in (*gone, *changed) if name in old.functions):
        raise _CannotChange
    if gone:
        yield b"\\builtin unset -f -- " + b" ".join(map(quote, gone))
    if changed:
        # A body may need extended patterns to be parsed at all; the option itself is set right by `prepare`.
        yield b"\\builtin shopt -s extglob"
    for name, function in changed.items():
        yield b"\\builtin eval -- " + quote(definition(name, function))
        for letter in function.attributes:
            yield b"\\builtin declare -f%s -- %s" % (letter.encode(), quote(name))


def _options(fresh: ShellState, state: ShellState) -> Iterable[bytes]:
    if state.options != fresh.options:
        on = b"".join(b" -o " + name.encode() for name in sorted(state.options - fresh.options))
        off = b"".join(b" +o " + name.encode() for name in sorted(fresh.options - state.options))
        yield b"\\builtin set" + off + on
    # extglob may have been switched on for the functions.
    off_names = fresh.shopts - state.shopts | ({"extglob"} - state.shopts if state.functions else frozenset())
    if off_names:
        yield b"\\builtin shopt -u " + " ".join(sorted(off_names)).encode()
    if state.shopts - fresh.shopts:
        yield b"\\builtin shopt -s " + " ".join(sorted(state.shopts - fresh.shopts)).encode()


def _aliases(state: ShellState) -> bytes:
    return b"\\builtin alias -- " + b" ".join(
        quote(f"{name}={value}") for name, value in state.aliases.items()
    )


def login(home_profiles: Iterable[str] = (".bash_profile", ".bash_login", ".profile")) -> bytes:
    """A login shell's way into its profile, with the dump already in place should the profile exit.

    Started with `--login --noprofile`, it reads the same files as bash would. Its stdin, stdout and stderr
    are nowhere: what a profile prints is nobody's output.
    """
    choice = " || ".join(f"{{ \\builtin test -r ~/{name} && __hc_n=~/{name}; }}" for name in home_profiles)
    begin = (
        "\\builtin test -r /etc/profile && \\builtin . /etc/profile; "
        f'{choice}; \\builtin test "${{__hc_n-}}" && \\builtin . "$__hc_n"; '
    )
    return _with_trap(_SET_TRAP + begin.encode() + LAST_WORDS)


def awaits_order(known: Known) -> bool:
    """Whether an exec, as a detached agent tells of it, is a shell that was never told a command."""
    return any(
        each.number == CONTROL_FD and each.kind is FdKind.INPUT and not each.position
        for each in known.channels
    )
