"""The bash text around a command: restoring a state, running it, giving the state back. Pure functions.

A shell is started ahead with `bootstrap`, restores the state it was given and waits. When a command comes,
`tail` brings it up to date, sets it on its way, and the bootstrap's last words dump the new state. Everything
is one line, so that line numbers in the command are its own; every command word is quoted or goes through
`\\builtin`, because users define functions and aliases of any name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hermitcrab.core.state import ShellState, Variable, is_loader

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
# be rid of a function called `builtin`.
_NOTE = (
    r"{ __hc_s=$? __hc_o=$SHELLOPTS __hc_b=$BASHOPTS "
    r"__hc_p=${POSIXLY_CORRECT+${POSIXLY_CORRECT@a}=$POSIXLY_CORRECT}; "
    r"POSIXLY_CORRECT=1; \unset -f builtin; \unset -v POSIXLY_CORRECT; \builtin trap - DEBUG ERR RETURN; "
    r"\builtin set +xveunfCk; \builtin shopt -u expand_aliases; } >/dev/null 2>&1"
)

# `exit` inside a function leaves its locals in sight. A variable is local when an assignment to the global of
# its name does not show through; unsetting it from one function deeper uncovers the next one. The question
# destroys what it asks about, so a copy of the shell (the pipeline) answers it. References and readonly
# variables cannot be asked; the host leaves them as they were.
_UNCOVER = (
    r'{ __hc_u () { \builtin unset -v "$@"; }; __hc_i=0; while \builtin test $((__hc_i++)) -lt 50; do '
    r"\builtin mapfile -t __hc_l < <(\builtin compgen -v | while IFS= \builtin read -r __hc_v; do "
    r"case $__hc_v in __hc_*|_|BASH*|FUNCNAME|LINENO|RANDOM|SRANDOM|SECONDS|EPOCH*|GROUPS|DIRSTACK|"
    r"PIPESTATUS|HISTCMD|OPT*|COMP_*) continue;; esac; "
    r'\builtin test -R "$__hc_v" && continue; case ${!__hc_v@a} in *r*) continue;; esac; '
    r'\builtin declare -g "$__hc_v=190473829" || continue; '
    r'\builtin test "${!__hc_v}" = 190473829 || \builtin printf "%s\n" "$__hc_v"; done); '
    r'\builtin test "${__hc_l[*]}" || break; __hc_u "${__hc_l[@]}"; done; '
    r"\builtin unset -f __hc_u; } 2>/dev/null"
)

# The nearest directory that is there, for a session whose own is gone.
_GO_UP = (
    r'{ until __hc_m=${__hc_m%/*}; \builtin cd -P -- "${__hc_m:-/}"; do '
    r'\builtin test "$__hc_m" || break; done; '
    r"""\builtin printf '%s\0' '' nocd "$PWD" >&247; } 2>/dev/null"""
)

_WRITE = (
    r"""{ \builtin printf '%s\0' '' state1 "$__hc_o" "$__hc_b" "$__hc_p" "${FUNCNAME+f}" """
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
_EXIT_TRAP_WITH_USERS = (
    _NOTE
    + "\ncase ${__hc_g-} in 1) ;; *) "
    + _DUMP
    + ";; esac\n"
    + r'\builtin test "$__hc_t" && { \builtin eval "__hc_t=($__hc_t)"; __hc_q () { \builtin unset -f __hc_q; '
    + r'\builtin return "$__hc_s"; }; __hc_q; \builtin eval "${__hc_t[2]}"; }'
)

VERBOSE_ECHOES = tuple(
    text.partition("\n")[0].encode() + b"\n" for text in (_EXIT_TRAP, _EXIT_TRAP_WITH_USERS)
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
        + b"\\exec 7<&-; \\builtin trap "
        + _QUOTED_EXIT_TRAP
        + b' EXIT; \\builtin eval "$__hc_n"; '
        + _LAST_WORDS
    )


_QUOTED_EXIT_TRAP = quote(_EXIT_TRAP)
_LAST_WORDS = f'{_NOTE}; {_DUMP}; __hc_g=1; \\builtin exit "$__hc_s"\n'.encode()

_RECEIVE = b'\\builtin read -r -u 7 __hc_n && \\builtin read -r -N "$__hc_n" -u 7 __hc_n || \\builtin exit; '

RECEIVE_AND_RESTORE = _RECEIVE + b'\\builtin eval "$__hc_n"; '
"""As `restore`, for a state that is too large for the bootstrap: it comes as a message of its own, first."""


def message(text: bytes) -> bytes:
    """What the waiting shell reads: the length, then the text."""
    return b"%d\n" % len(text) + text


def tail(changes: bytes, preparation: bytes, command: str) -> bytes:
    """From the state that the shell was started with to the end of the command.

    It first says that it has begun: a shell that dies before that can be replaced.
    """
    return b"".join(
        (
            b"\\builtin unset -v __hc_n; \\builtin printf b >&247; ",
            changes,
            preparation,
            b"\\builtin eval -- ",
            quote(command),
        )
    )


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
    """Only for commands that speak of `trap`: keeps the dump in front of the user's own EXIT trap."""
    ours = quote(_EXIT_TRAP_WITH_USERS)
    # What does not concern EXIT is left to the builtin as the function's last command, so that a DEBUG trap
    # sees nothing of us.
    return (
        b"trap () { { \\builtin local - __hc_r; \\builtin set +xveu; } 2>/dev/null; "
        b'case "$BASHPID $$ $# $*" in '
        b'"$$ $$ 0 "*|"$$ $$ "*EXIT*|"$$ $$ "*[Ee]xit*|"$$ $$ "*" 0"|"$$ $$ "*" 0 "*|"$$ $$ "*" -p"*) '
        b'\\builtin trap - EXIT; \\builtin eval "$__hc_t"; \\builtin trap "$@"; __hc_r=$?; '
        b"__hc_t=$(\\builtin trap -p EXIT); \\builtin trap " + ours + b' EXIT; \\builtin return "$__hc_r";; '
        b'*) \\builtin trap "$@";; esac; }; __hc_t=; \\builtin trap ' + ours + b" EXIT"
    )


SHIM_MARK = "__hc_t"
"""Tells our `trap` function from one of the user's."""


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
    }


_LATE_FUNCTIONS = frozenset({"exec"})
"""The bootstrap still needs the real one after it has restored the state."""


def _functions(old: ShellState, new: ShellState, *, late: bool) -> Iterable[bytes]:
    if old.functions is new.functions:
        return
    gone = [name for name in old.functions.keys() - new.functions.keys() if (name in _LATE_FUNCTIONS) is late]
    changed = {
        name: function
        for name, function in new.functions.items()
        if (name in _LATE_FUNCTIONS) is late and old.functions.get(name) != function
    }
    if any("r" in old.functions[name].attributes for name in (*gone, *changed) if name in old.functions):
        raise _CannotChange
    if gone:
        yield b"\\builtin unset -f -- " + b" ".join(map(quote, gone))
    if changed:
        # A body may need extended patterns to be parsed at all; the option itself is set right by `prepare`.
        yield b"\\builtin shopt -s extglob"
    for name, function in changed.items():
        yield b"\\builtin eval -- " + quote(f"{name} () \n{function.body}")
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
    return (
        "\\exec 0<&8 8<&-; \\builtin trap " + quote(_EXIT_TRAP).decode() + " EXIT; "
        "\\builtin test -r /etc/profile && \\builtin . /etc/profile; "
        f'{choice}; \\builtin test "${{__hc_n-}}" && \\builtin . "$__hc_n"; \\builtin exit 0\n'
    ).encode()
