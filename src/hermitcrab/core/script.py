"""The bash text around a command: restoring a state, running it, giving the state back. Pure functions.

A shell is started ahead with `bootstrap`, restores the state it was given and waits. When a command comes,
`tail` brings it up to date, sets it on its way, and the bootstrap's last words dump the new state. Everything
is one line, so that line numbers in the command are its own; every command word is quoted or goes through
`\\builtin`, because users define functions and aliases of any name.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping

from hermitcrab.core.state import Function, ShellState, Variable, is_loader

STDIN_FD = 8
"""Where the command's stdin waits while descriptor 0 is the bootstrap."""
CONTROL_FD = 7
STATE_FD = 247
"""High, because scripts like 3 to 9 and 200."""

PRIVATE = "__hc_"
"""The prefix of our own variables; they exist outside commands only and are never captured."""

NO_DIRECTORY = b"nocd"
DUMP_BEGIN = b"state1"
DUMP_END = b"end"

_SAFE = re.compile(rb"[A-Za-z0-9_./:@%+,-]+")
_UNUSUAL = re.compile(rb"[\x00-\x1f\x7f-\xff]+")
_OCTAL = [b"\\%03o" % byte for byte in range(256)]

_LATE = re.compile("IFS|TMOUT|POSIXLY_CORRECT|BASH_.*|FUNCNEST|GLOBIGNORE|EXECIGNORE")
"""Variables that change how bash itself reads: restored only after it has read the command."""

# Under `set -x`, a DEBUG trap or a closed stderr the dump must stay silent, and the status and the options
# have to be noted first. In POSIX mode special builtins win over functions of their name: the only way to
# be rid of a function called `builtin`. Its text is told by another bash that inherits it.
_NOTE = (
    r"{ __hc_s=$? __hc_x=${__hc_x-${-//[^uvx]/}} __hc_o=$SHELLOPTS __hc_b=$BASHOPTS "
    r"__hc_p=${POSIXLY_CORRECT+${POSIXLY_CORRECT@a}=$POSIXLY_CORRECT}; POSIXLY_CORRECT=1; "
    r"\export -f builtin && { (\exec /proc/self/exe -c 'declare -f builtin' >&247); \unset -f builtin; }; "
    r"\unset -v POSIXLY_CORRECT; \builtin trap - DEBUG ERR RETURN; "
    r"\builtin set +xveunfCk; \builtin shopt -u expand_aliases; } >/dev/null 2>&1"
)

# `exit` inside a function leaves its locals in sight. A variable is local when an attribute given to the
# global of its name does not show; unsetting it from one function deeper uncovers the next one. What is left
# over is the attribute t, which the host then ignores. A readonly local cannot be unset, so it is named; a
# reference passes its attributes on, so a copy of the shell is asked where it leads.
_NAMES = " ".join(f'"${{!{letter}@}}"' for letter in "_" + string.ascii_letters)
_UNCOVER = (
    r'{ __hc_u () { \builtin unset "$@"; }; __hc_y=; for __hc_v in '
    + _NAMES
    + r"; do case $__hc_v in __hc_*|_|BASH*|FUNCNAME|LINENO|RANDOM|SRANDOM|SECONDS|EPOCH*|GROUPS|DIRSTACK|"
    r"PIPESTATUS|HISTCMD|OPT*|COMP_*|*UID|PPID|SHELLOPTS) continue;; esac; __hc_i=0; "
    r'while \builtin test $((__hc_i++)) -lt 100000; do if \builtin test -R "$__hc_v"; then '
    r'(\builtin declare -gn "$__hc_v=__hc_w" && \builtin eval "\builtin test \"\${!$__hc_v}\" = __hc_w") '
    r'&& break; __hc_u -n "$__hc_v" || break; else \builtin declare -gt "$__hc_v"; '
    r'case ${!__hc_v@a} in *t*) break;; *[aA]*) ;; *) \builtin test -v "$__hc_v" || break;; esac; '
    r'__hc_u -v "$__hc_v" || { __hc_y+=" $__hc_v"; break; }; fi; done; done; '
    r"\builtin unset -f __hc_u; } 2>/dev/null"
)

# The nearest directory that is there, for a session whose own is gone.
_GO_UP = (
    r'{ until __hc_m=${__hc_m%/*}; \builtin cd -P -- "${__hc_m:-/}"; do '
    r'\builtin test "$__hc_m" || break; done; '
    r"""\builtin printf '%s\0' '' nocd "$PWD" >&247; } 2>/dev/null"""
)

_WRITE = (
    r"""{ \builtin printf '%s\0' '' state1 "$__hc_o" "$__hc_b" "$__hc_p" "${FUNCNAME+f$__hc_y}" """
    r""""${OLDPWD+=$OLDPWD}"; """
    r"""\builtin umask; \builtin pwd -P || \builtin printf '%s\n' "$PWD"; \builtin printf '\0'; """
    r"\builtin declare -p BASH_ALIASES; \builtin printf '\0'; \builtin declare -p; \builtin printf '\0'; "
    r"\builtin declare -F; \builtin printf '\0'; \builtin declare -f; \builtin printf '\0end\0'; } "
    r">&247 2>/dev/null"
)

_DUMP = (
    r'if \builtin test "${__hc_m-}"; then '
    + _GO_UP
    + r'; else \builtin test "${FUNCNAME+f}" && '
    + _UNCOVER
    + "; "
    + _WRITE
    + "; fi"
)

# Two lines: the second is parsed after the first has switched aliases off. When the shell has already dumped
# its state after the command, the trap is left at once.
_EXIT_TRAP = (
    r"{ __hc_r=$?; case ${__hc_g-} in 1) \builtin exit $__hc_r;; esac; } >/dev/null 2>&1; "
    + _NOTE.replace("$?", "$__hc_r")
    + "\n"
    + _DUMP
)
# What the user's own trap is put behind, with the status and the options that it expects to find.
_EXIT_TRAP_BEFORE_USERS = (
    _NOTE
    + "\ncase ${__hc_g-} in 1) ;; *) "
    + _DUMP
    + ";; esac; "
    + r"{ __hc_q () { \builtin unset -f __hc_q trap command; \builtin unset -v ${!__hc_@}; "
    + r'case $2 in ?*) \builtin set -$2;; esac; \builtin return "$1"; }; '
    + r'__hc_q "$__hc_s" "$__hc_x"; } 2>/dev/null'
)

VERBOSE_ECHOES = tuple(
    text.partition("\n")[0].encode() + b"\n" for text in (_EXIT_TRAP, _EXIT_TRAP_BEFORE_USERS)
)
"""What `set -v; exit` prints of a trap before the trap can stop it."""


def quote(text: str | bytes) -> bytes:
    """One word of bash that stands for exactly these bytes: plain ASCII, so that any locale reads it alike,
    and without a line break."""
    data = text if isinstance(text, bytes) else encode(text)
    if _SAFE.fullmatch(data):
        return data
    data = data.replace(b"\\", b"\\\\").replace(b"'", b"\\'").replace(b"\n", b"\\n")
    return b"$'" + _UNUSUAL.sub(_in_octal, data) + b"'"


def _in_octal(match: re.Match[bytes]) -> bytes:
    return b"".join([_OCTAL[byte] for byte in match[0]])


def encode(text: str) -> bytes:
    return text.encode(errors="surrogateescape")


def bootstrap(restore: bytes) -> bytes:
    """The whole life of a shell that is started ahead: restore, wait for the tail, run it, dump, exit."""
    return (
        b"\\exec 0<&8 8<&-; "
        + (b"{ " + restore + b"} 2>/dev/null; " if restore else b"")
        + _RECEIVE
        + b"\\builtin trap "
        + _QUOTED_EXIT_TRAP
        + b' EXIT; \\builtin eval "$__hc_n"; '
        + _LAST_WORDS
    )


_QUOTED_EXIT_TRAP = quote(_EXIT_TRAP)
_LAST_WORDS = f'{_NOTE}; {_DUMP}; __hc_g=1; \\builtin exit "$__hc_s"\n'.encode()

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
    quietly = b"{ " + changes + b"} 2>/dev/null; " if changes else b""
    begin = b"\\exec 7<&-; \\builtin unset -v __hc_n; \\builtin printf b >&247; " + quietly + preparation
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
        b"\\builtin declare -x OLDPWD=" + quote(oldpwd)
        if oldpwd is not None
        else b"\\builtin unset -v OLDPWD",
        *_functions(fresh, state, late=True),
        *_variables(fresh.variables, state.variables, late=True),
        *_declare({name: Variable(value, "x") for name, value in injected.items()}),
        *_options(fresh, state),
        *([b"\\builtin umask " + state.umask.encode()] if state.umask != fresh.umask else []),
        *([_trap_shim()] if traps else []),
        *([_aliases(state)] if state.aliases else []),
    ]
    return b"{ " + b"; ".join(parts) + b"; } 2>/dev/null; "


def _trap_shim() -> bytes:
    """Only for commands that speak of `trap`: keeps the dump in front of the user's own EXIT trap.

    `__hc_t` is the user's EXIT trap as bash would list it. A subshell lists what it inherited until it sets
    its own. What does not concern EXIT is left to the builtin as the function's last command, so that a DEBUG
    trap sees nothing of us.
    """
    ours = quote(_EXIT_TRAP_BEFORE_USERS + "\n")
    return (
        rb"trap () { { \builtin local - __hc_r; \builtin set +xveu; } 2>/dev/null; "
        rb'case "$((BASHPID == $$)) $# $*" in 1" 0 "*|1*EXIT*|1*[Ee]xit*|1*" 0"|1*" 0 "*|1*" -p"*) '
        rb'\builtin trap - EXIT; \builtin eval "\\builtin ${__hc_t-}"; \builtin trap "$@"; __hc_r=$?; '
        rb'__hc_t=$(\builtin trap -p EXIT); \builtin eval "__hc_a=($__hc_t)"; '
        rb"\builtin trap " + ours + rb'"${__hc_a[2]-}" EXIT; \builtin return "$__hc_r";; '
        rb'0" 0 "*|0*" -p"*) case ${__hc_w-} in "$BASHPID") ;; *) '
        rb'\builtin eval "\\builtin ${__hc_t:-trap - EXIT}"; \builtin trap "$@"; __hc_r=$?; '
        rb'\builtin trap - EXIT; \builtin return "$__hc_r";; esac; \builtin trap "$@";; '
        rb'*) __hc_w=$BASHPID; \builtin trap "$@";; esac; }; '
        rb'command () { case ${__hc_z-}$1 in trap) \builtin shift; trap "$@";; '
        rb'*) \builtin command "$@";; esac; }; '
        rb"\builtin trap " + ours + rb" EXIT"
    )


SHIMS = frozenset({"trap", "command"})
"""Functions that may be ours; the private variables in them tell."""


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


def environment(state: ShellState) -> dict[str, Variable]:
    """What a shell may be started with instead of being told: plain exports that bash does not act on."""
    return {
        name: variable
        for name, variable in state.variables.items()
        if variable.attributes == "x"
        and isinstance(variable.value, str)
        and not _LATE.fullmatch(name)
        and not is_loader(name)
        and not name.startswith(("LANG", "LC_"))  # bash would complain aloud of a locale that is missing
    }


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
    return (
        b"\\exec 0<&8 8<&-; \\builtin trap " + _QUOTED_EXIT_TRAP + b" EXIT; " + begin.encode() + _LAST_WORDS
    )
