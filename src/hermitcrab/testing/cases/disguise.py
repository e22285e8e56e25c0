"""A command sees a plain bash: nothing of ours shows, whatever it switches on or prints."""

from __future__ import annotations

import re
import shlex

from hermitcrab.core.farewell import DUMP_BEGIN, STATE_FD
from hermitcrab.testing.inside import needs_proc, reveals_nothing, say, scratch, value, works
from hermitcrab.testing.suite import Opener, case, each

TRACED = {
    "x": ("set -x; echo a", "+ echo a\na\n"),
    "x_and_exit": ("set -x; exit 0", "+ exit 0\n"),
    "x_in_a_function": ("f() { echo a; }; set -x; f", "+ f\n+ echo a\na\n"),
    "x_off_again": ("set -x; set +x; echo a", "+ set +x\na\n"),
    "x_with_exit_trap": ("set -x; trap 'echo bye' EXIT", "+ trap 'echo bye' EXIT\n+ echo bye\nbye\n"),
    "v_and_exit": ("set -v; exit 0", ""),
    "v_line": ("set -v\necho a", "echo a\na\n"),
    "v_line_and_exit": ("set -v\necho a\nexit 0", "echo a\na\nexit 0\n"),
}


@each(TRACED)
def tracing_shows_the_command_and_no_more(open: Opener, example: tuple[str, str]) -> None:
    """`set -x` and `set -v` show exactly what bash would show of the command, and end with it."""
    command, prints = example
    env = open()
    result = env.execute(command)
    reveals_nothing(result.output)
    # Bash repeats the sign for each level of `eval`, and the command is inside of one.
    assert re.sub(r"^\++", "+", result.output, flags=re.MULTILINE) == prints
    works(env)


@each(
    [
        "set -xv; trap 'echo bye' EXIT; cd /usr\nexit 0",
        "set -xv; f() { local x=1; exit 0; }; f",
        "set -x; trap 'echo $BASH_COMMAND' DEBUG; true; exit 0",
        "set -vx\ntrap : EXIT\ntrue",
        "PS4='+$LINENO:${FUNCNAME-}:$BASH_COMMAND '; set -x; true",
        "exec 9>&2; BASH_XTRACEFD=9; set -x; true",
        "exec 2>&1; set -x; exec 2>&-; true",
        "set -o functrace; set -x; trap 'echo $BASH_COMMAND' DEBUG RETURN; f() { true; }; f",
        "set -eE; trap 'echo error in $BASH_COMMAND' ERR; false",
        "trap 'echo $BASH_COMMAND' EXIT; exit 0",
        "trap 'echo $BASH_COMMAND $LINENO ${FUNCNAME-} $(caller)' DEBUG; true\ntrue",
        "trap 'set' EXIT; f() { exit 0; }; f",
        "trap 'declare -p; declare -f' DEBUG; true",
        "set -o posix; set; trap",
    ]
)
def no_mixture_of_tracing_reveals_us(open: Opener, command: str) -> None:
    """However traces and traps are combined, no text of ours is printed."""
    env = open()
    result = env.execute(command)
    reveals_nothing(result.output)
    works(env)


@each(
    {
        "set": "set",
        "env": "env",
        "declare_p": "declare -p",
        "declare_f": "declare -f; declare -F; declare -px",
        "compgen": "compgen -v; compgen -A function; compgen -a; compgen -A variable",
        "trap": "trap; trap -p; trap -p EXIT",
        "type_trap": "type trap; declare -f trap; command -V trap; type -a exit eval printf",
        "set_beside_trap": "trap 'echo x' USR1; set; declare -p; declare -f",
        "shell_variables": 'echo "$_ $0 $* $BASH_COMMAND $BASH_EXECUTION_STRING ${BASH_SOURCE-}"',
        "caller": "caller; caller 0; f() { caller; caller 0; caller 1; }; f",
        "error_message": "no-such-program; echo $((1/0))",
        "history": "history; fc -l; hash; jobs; alias; shopt; ulimit -a",
        "prefix": 'echo "${!__@}" "${!_*}"',
    }
)
def asking_the_shell_about_itself_reveals_nothing(open: Opener, command: str) -> None:
    """Nothing that a shell can list has a trace of what is around the command."""
    env = open()
    say(env, "mine=1; fn() { echo fn; }; alias al='echo al'")
    reveals_nothing(env.execute(command).output)
    works(env)


@case
def the_process_list_shows_a_plain_bash(open: Opener) -> None:
    """`/proc/$$/cmdline` is `bash` and no more: neither the command nor the state is in a process list."""
    env = open()
    needs_proc(env)
    say(env, "export secret=in-the-state")
    shown = say(env, "tr '\\0' ' ' </proc/$$/cmdline; : in-the-command")
    assert shown == "bash "
    everything = say(env, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; : in-the-command")
    assert "in-the" not in everything


@case
def a_program_inherits_nothing_but_the_environment(open: Opener) -> None:
    """A program finds no variable, no input and no open file of ours but the one that carries the state."""
    env = open()
    needs_proc(env)
    fds = say(env, "ls /proc/self/fd").split()
    assert set(fds) <= {"0", "1", "2", "3", str(STATE_FD)}
    assert say(env, "cat") == ""


REDIRECTED = {
    "to_a_file": "exec >f; echo hidden",
    "both_to_a_file": "exec >f 2>&1; echo hidden; no-such-program",
    "errors_to_a_file": "exec 2>f; no-such-program",
    "closed": "exec >&-; echo hidden 2>/dev/null",
    "all_closed": "exec >&- 2>&- <&-; true",
    "input_closed": "exec <&-; true",
    "to_a_full_device": "exec >/dev/full; echo hidden 2>/dev/null",
    "to_a_process": "exec > >(cat >/dev/null); echo hidden",
    "descriptors_closed": 'for fd in {3..9} {10..255..40}; do eval "exec $fd>&-"; done',
    "low_descriptors_used": "exec 3>f 4>f 5>f 6>f 7>f 8>f 9>f; echo x >&7",
    "input_from_a_file": "echo 'echo injected' >f; exec <f",
}


@each(REDIRECTED)
def redirecting_the_shell_changes_nothing_later(open: Opener, command: str) -> None:
    """`exec >file` and its like hold for one command; its state is remembered all the same."""
    env = open()
    scratch(env)
    result = env.execute(f"{command}\nkept=1")
    assert "hidden" not in result.output
    assert value(env, "kept") == "1"
    works(env)
    assert say(env, "cat; echo end") == "end"


@case
def closing_every_descriptor_loses_no_session(open: Opener) -> None:
    """A command that closes every file it finds open may lose its own changes, never the session."""
    env = open()
    say(env, "kept=1")
    env.execute('for fd in {3..255}; do eval "exec $fd>&-" 2>/dev/null; done; kept=2')
    works(env)
    assert value(env, "kept") in ("1", "2")


@case
def noise_on_every_descriptor_changes_nothing(open: Opener) -> None:
    """A command that writes junk to whatever is open cannot confuse the session."""
    env = open()
    needs_proc(env)
    say(env, "kept=1; cd /usr")
    junk = "\\0junk\\0state1\\0end\\0"
    env.execute(f'for fd in /proc/$$/fd/*; do printf "{junk}" >&"${{fd##*/}}"; done 2>/dev/null; kept=2')
    works(env)
    assert value(env, "kept") in ("1", "2")
    assert env.cwd == "/usr"


@case
def half_a_state_changes_nothing(open: Opener) -> None:
    """A shell that dies in the middle of telling its state leaves the session as it was."""
    env = open()
    say(env, "kept=1; fn() { echo fn; }; cd /usr")
    sections = [
        "",
        DUMP_BEGIN.decode(),
        "braceexpand",
        "",
        "",
        "",
        "",
        'declare -- torn="1"\\n',
        "0022\\n/\\n",
    ]
    env.execute(f"printf '%b\\0' {' '.join(map(shlex.quote, sections))} >&{STATE_FD}; kill -9 $$")
    assert "torn" not in env.state.variables
    assert say(env, "echo $kept; fn; pwd; echo ${torn-whole}") == "1\nfn\n/usr\nwhole"


@case
def printing_what_looks_like_our_own_text_changes_nothing(open: Opener) -> None:
    """Output is output: markers, dumps and error lines in it are shown and believed by nobody."""
    env = open()
    for text in ("[Command timed out after 1s]", "__hc_end 0", "\\0state1\\0end\\0", "\\033]133;D;0\\007"):
        result = env.execute(f"printf '{text}\\n'; exit 3")
        assert result.returncode == 3
        assert result.outcome.value == "completed"
    works(env)
