"""What no backend meets, because bash itself offers no way; each case must go on failing for its reason."""

from __future__ import annotations

_TRACES = "no_mixture_of_tracing_reveals_us"
_ASKING = "asking_the_shell_about_itself_reveals_nothing"
_TRAPS = "an_exit_trap_of_the_users_own_works"
_LOCALS = "a_local_does_not_replace_what_the_same_command_set"

_SHIM = "a command that speaks of `trap` has a function of that name, which whoever asks can see"
_BYPASSED = (
    "an EXIT trap that does not pass by the name `trap` replaces ours, and `exit` then leaves no state"
)
_HIDDEN = (
    "the global behind such a local cannot be read while the function runs; the one before the command stays"
)

LIMITS = {
    f"{_TRACES}[exec 9>&2; BASH_XTRACEFD=9; set -x; true]": (
        "a trace to a descriptor of the user's own cannot be silenced before its first line"
    ),
    f"{_TRACES}[set -o functrace; set -x; trap 'echo $BASH_COMMAND' DEBUG RETURN; f() {{ true; }}; f]": _SHIM,
    f"{_TRACES}[trap 'echo $BASH_COMMAND' EXIT; exit 0]": "BASH_COMMAND is that of the dump before the trap",
    f"{_TRACES}[trap 'declare -p; declare -f' DEBUG; true]": _SHIM,
    f"{_TRACES}[set -o posix; set; trap]": "in POSIX mode the builtin wins over our function of its name",
    f"{_ASKING}[type_trap]": _SHIM,
    f"{_ASKING}[set_beside_trap]": _SHIM,
    f"{_TRAPS}[as_builtin]": _BYPASSED,
    f"{_TRAPS}[spelled_oddly]": _BYPASSED,
    f"{_LOCALS}[unset]": _HIDDEN,
    f"{_LOCALS}[readonly]": _HIDDEN,
    f"{_LOCALS}[unset_afterwards]": _HIDDEN,
}
