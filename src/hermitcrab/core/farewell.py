"""A shell's last words: the bash text that gives its state back, after the command or in an EXIT trap.

`dump.py` reads what is written here. Private variables exist outside commands only.
"""

from __future__ import annotations

from hermitcrab.core.quoting import quote

STATE_FD = 247
"""High, because scripts like 3 to 9 and 200."""

PRIVATE = "__hc_"
"""The prefix of our own variables; they exist outside commands only and are never captured."""

NO_DIRECTORY = b"nocd"
DUMP_BEGIN = b"state1"
DUMP_END = b"end"

# Under `set -x`, a DEBUG trap or a closed stderr the dump must stay silent, and the status and the options
# have to be noted first. In POSIX mode special builtins win over functions of their name: the only way to
# be rid of a function called `builtin`. Its text is told by another bash that inherits it.
_NOTE = (
    r"__hc_s=$? __hc_x=${__hc_x-$-} __hc_o=$SHELLOPTS __hc_b=$BASHOPTS "
    r"__hc_p=${POSIXLY_CORRECT+${POSIXLY_CORRECT@a}=$POSIXLY_CORRECT}; POSIXLY_CORRECT=1; "
    r"\trap - DEBUG ERR RETURN; \set +xveunfCk; "
    r"\export -f builtin && { (\exec /proc/self/exe -c 'declare -f builtin' >&247); \unset -f builtin; }; "
    r"\unset -v POSIXLY_CORRECT"
)
# In a trap, whose next line must be parsed without aliases.
_NOTE_IN_TRAP = "{ " + _NOTE + r"; \builtin shopt -u expand_aliases; } >/dev/null 2>&1"

# `exit` inside a function leaves its locals in sight. A variable is local when an attribute given to the
# global of its name does not show; unsetting it from one function deeper uncovers the next one. What is left
# over is the attribute t, which the host then ignores. A readonly local cannot be unset, so it is named; a
# reference passes its attributes on, so a copy of the shell is asked where it leads.
UNCOVER = (
    r'{ __hc_u () { \builtin unset "$@"; }; __hc_y=; \builtin mapfile -t __hc_l < <(\builtin compgen -v); '
    r'for __hc_v in "${__hc_l[@]}"; do '
    r"case $__hc_v in __hc_*|_|BASH*|FUNCNAME|LINENO|RANDOM|SRANDOM|SECONDS|EPOCH*|GROUPS|DIRSTACK|"
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

# `declare -p` tells of the aliases as they were when somebody last looked at them, so the first line does.
_WRITE = (
    r"""\builtin printf '%s\0' '' state1 "$__hc_o" "$__hc_b" "$__hc_p" "${FUNCNAME+f$__hc_y}" """
    r""""${OLDPWD+=$OLDPWD}${BASH_ALIASES+}"; \builtin declare -p; \builtin printf '\0'; """
    r"""\builtin declare -F; \builtin umask; \builtin pwd -P || \builtin printf '%s\n' "$PWD"; """
    r"\builtin printf '\0'; \builtin declare -f; \builtin printf '\0end\0'"
)

_DUMP = (
    r'if \builtin test "${__hc_m-}"; then '
    + _GO_UP
    + r'; else \builtin test "${FUNCNAME+f}" && '
    + UNCOVER
    + "; { "
    + _WRITE
    + "; } >&247 2>/dev/null; fi"
)

# Three lines, because bash parses one after the other: mostly the shell has already dumped its state after
# the command, and the trap is left after the first; the third is parsed after the second.
_TRAP_BEGIN = (
    r"{ __hc_r=$?; case ${__hc_g-} in 1) \builtin exit $__hc_r;; esac; } >/dev/null 2>&1"
    + "\n"
    + _NOTE_IN_TRAP.replace("$?", "$__hc_r")
    + "\n"
)
EXIT_TRAP = _TRAP_BEGIN + _DUMP
# What the user's own trap is put behind, with the status and the options that it expects to find.
_BEFORE_USERS = (
    _NOTE_IN_TRAP
    + "\ncase ${__hc_g-} in 1) ;; *) "
    + _DUMP
    + ";; esac; "
    + r"{ __hc_q () { \builtin unset -f __hc_q trap command; \builtin unset -v ${!__hc_@}; "
    + r'case $2 in ?*) \builtin set -$2;; esac; \builtin return "$1"; }; '
    + r'__hc_q "$__hc_s" "${__hc_x//[^uvx]/}"; } 2>/dev/null'
)

VERBOSE_ECHOES = tuple(text.encode() for text in (_TRAP_BEGIN, _NOTE_IN_TRAP + "\n"))
"""What `set -v; exit` prints of a trap before the trap can stop it."""

# After the command no function is running and the directory was found, so the rest of the dump is not needed.
LAST_WORDS = f'{{ {_NOTE}; {_WRITE}; }} >&247 2>/dev/null; __hc_g=1; \\builtin exit "$__hc_s"\n'.encode()


def trap_shim() -> bytes:
    """Only for commands that speak of `trap`: keeps the dump in front of the user's own EXIT trap.

    `__hc_t` is the user's EXIT trap as bash would list it. A subshell lists what it inherited until it sets
    its own. What does not concern EXIT is left to the builtin as the function's last command, so that a DEBUG
    trap sees nothing of us.
    """
    ours = quote(_BEFORE_USERS + "\n")
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
