"""However a command ends, what it did until then is remembered, and the next one is not harmed."""

from __future__ import annotations

from hermitcrab.result import Outcome
from hermitcrab.testing.inside import say, scratch, value, works
from hermitcrab.testing.suite import Opener, case, each

ENDINGS = {
    "exit": ("exit 3", 3),
    "exit_without_number": ("(exit 4); exit", 4),
    "exit_beyond_a_byte": ("exit 300", 44),
    "exit_in_a_function": ("f() { exit 5; }; f", 5),
    "exit_in_eval": ("eval 'exit 6'", 6),
    "exit_in_a_sourced_text": (". /dev/stdin <<< 'exit 7'", 7),
    "exit_as_builtin": ("builtin exit 8", 8),
    "exit_in_a_group": ("{ exit 9; } 2>/dev/null", 9),
    "set_e": ("set -e; false; echo not reached", 1),
    "set_e_in_a_function": ("set -e; f() { (exit 12); echo not reached; }; f", 12),
    "set_e_and_pipefail": ("set -eo pipefail; (exit 13) | cat; echo not reached", 13),
    "set_u": ("set -u; echo $nothing_here; echo not reached", 1),
    "required_variable": ("echo ${nothing_here:?is missing}", 1),
    "division_by_zero": ("echo $((1/0))", 1),
    "missing_program": ("no-such-program", 127),
    "not_executable": ("/dev/null", 126),
    "last_status": ("(exit 42)", 42),
    "negated": ("! true", 1),
    "return": ("return 11", 2),
    "stray_break": ("break", 0),
    "background_last": ("(exit 14) & wait $!", 14),
    "pipeline": ("true | (exit 15)", 15),
    "exec_redirection": ("exec 9>/dev/null; (exit 16)", 16),
}


@each(ENDINGS)
def the_state_is_captured_at_the_end_by(open: Opener, example: tuple[str, int]) -> None:
    """However a command ends by itself, its status is told and its state is remembered."""
    ending, status = example
    env = open()
    result = env.execute(f"cd /usr; export kept=1; fn() {{ echo fn; }}; alias al='echo al'; {ending}")
    assert result.outcome is Outcome.COMPLETED
    if ending not in ("echo ${nothing_here:?is missing}", "set -u; echo $nothing_here; echo not reached"):
        assert result.returncode == status
    assert result.returncode != 0 or status == 0
    assert "not reached" not in result.output
    assert say(env, "pwd; echo $kept; fn; al") == "/usr\n1\nfn\nal"


@each(
    {
        "open_quote": "echo 'open",
        "open_brace": "f() {",
        "stray_parenthesis": "echo )",
        "stray_done": "done",
        "second_line": "true\necho (",
        "open_if": "if true",
        "bad_redirection": "cat <",
    }
)
def a_syntax_error_is_the_commands_own(open: Opener, command: str) -> None:
    """A command that bash cannot read fails with bash's message, and nothing is forgotten."""
    env = open()
    say(env, "cd /usr; kept=1")
    result = env.execute(command)
    assert result.returncode in (1, 2)
    assert "syntax error" in result.output or "unexpected" in result.output
    assert "__hc" not in result.output
    assert say(env, "echo $kept; pwd") == "1\n/usr"


@each(
    {
        "empty": ("", ""),
        "blanks": ("  \n\t", ""),
        "comment": ("# nothing", ""),
        "comment_last": ("echo a # b", "a\n"),
        "backslash_last": ("echo a \\", "a \\\n"),
        "line_break_last": ("echo a\n\n", "a\n"),
        "heredoc": ("cat <<E\n$((1+1))\nE\n", "2\n"),
        "quoted_heredoc": ("cat <<'E'\n$((1+1))\n'\nE\necho b", "$((1+1))\n'\nb\n"),
        "here_string": ("cat <<< 'a  b'", "a  b\n"),
        "leading_dash": ("-x() { echo dash; }; -x", "dash\n"),
        "many_lines": ("for i in 1 2\ndo\n  echo $i\ndone", "1\n2\n"),
        "unicode": ("echo 'é 中 🦀'", "é 中 🦀\n"),
        "exclamation": ("echo hi! !!", "hi! !!\n"),
        "line_numbers": ("echo $LINENO\necho $LINENO", "1\n2\n"),
        "name": ("echo $0 $# $BASH_SUBSHELL ${#FUNCNAME[@]}", "bash 0 0 0\n"),
        "status_at_the_start": ("echo $?", "0\n"),
        "tabs_and_backslashes": ("printf '%s\\n' 'a\tb\\c' \"d\\\\e\"", "a\tb\\c\nd\\e\n"),
        "percent": ("echo %s %d 100%", "%s %d 100%\n"),
        "control_characters": ("echo '\x01\x02\x7f\x1b'", "\x01\x02\x7f\x1b\n"),
    }
)
def a_command_means_what_bash_says_it_means(open: Opener, example: tuple[str, str]) -> None:
    """The text of a command is bash's to read, unchanged."""
    command, prints = example
    env = open()
    result = env.execute(command)
    assert (result.output, result.returncode) == (prints, 0)
    works(env)


TRAPS = {
    "plain": ("trap 'echo bye $?' EXIT; exit 3", "bye 3\n", 3),
    "at_the_end": ("trap 'echo bye $?' EXIT; true", "bye 0\n", 0),
    "after_set_e": ("set -e; trap 'echo bye $?' EXIT; false", "bye 1\n", 1),
    "calls_exit": ("trap 'echo bye; exit 9' EXIT; exit 3", "bye\n", 9),
    "calls_exit_at_the_end": ("trap 'echo bye; exit 9' EXIT; false", "bye\n", 9),
    "by_number": ("trap 'echo bye' 0; exit 3", "bye\n", 3),
    "lower_case": ("trap 'echo bye' exit", "bye\n", 0),
    "among_others": ("trap 'echo bye' INT EXIT TERM; exit 3", "bye\n", 3),
    "function": ("bye() { echo bye $? $1; }; trap 'bye now' EXIT; exit 3", "bye 3 now\n", 3),
    "set_in_a_function": ("f() { trap 'echo bye' EXIT; }; f; echo body", "body\nbye\n", 0),
    "exit_in_a_function": ("trap 'echo bye $?' EXIT; f() { local x=1; exit 4; }; f", "bye 4\n", 4),
    "taken_back": ("trap 'echo bye' EXIT; trap - EXIT; exit 3", "", 3),
    "ignored": ("trap '' EXIT; exit 3", "", 3),
    "replaced": ("trap 'echo one' EXIT; trap 'echo two' EXIT", "two\n", 0),
    "in_a_subshell": ("(trap 'echo sub' EXIT; exit 2); echo $?", "sub\n2\n", 0),
    "in_a_substitution": ("x=$(trap 'echo sub' EXIT; echo a); echo $x", "a sub\n", 0),
    "quotes": ("trap 'echo \"it'\\''s\" $((1+1))' EXIT", "it's 2\n", 0),
    "several_lines": ("trap 'echo a\necho b' EXIT", "a\nb\n", 0),
    "with_other_traps": ("trap 'echo err' ERR; trap 'echo bye' EXIT; false; true", "err\nbye\n", 0),
    "on_a_signal": ("trap 'echo term; exit 5' TERM; kill -TERM $$; echo no", "term\n", 5),
    "in_eval": ("eval \"trap 'echo bye' EXIT\"; exit 3", "bye\n", 3),
    "as_builtin": ("builtin trap 'echo bye' EXIT; exit 3", "bye\n", 3),
    "by_command": ("command trap 'echo bye' EXIT; exit 3", "bye\n", 3),
    "in_sourced_text": (". /dev/stdin <<< \"trap 'echo bye' EXIT\"; exit 3", "bye\n", 3),
    "spelled_oddly": ("t=tr; ${t}ap 'echo bye $?' EXIT; exit 3", "bye 3\n", 3),
    "with_set_u": ("set -u; trap 'echo bye' EXIT; echo body", "body\nbye\n", 0),
}


@each(TRAPS)
def an_exit_trap_of_the_users_own_works(open: Opener, example: tuple[str, str, int]) -> None:
    """The user's EXIT trap runs once, its output is shown, it sees `$?`, and the state is captured."""
    command, prints, status = example
    env = open()
    result = env.execute(f"cd /usr; kept=1\n{command}")
    assert (result.output, result.returncode) == (prints, status)
    assert say(env, "echo $kept; pwd") == "1\n/usr"


@case
def traps_are_not_carried_to_the_next_command(open: Opener) -> None:
    """Nothing that one command traps happens in the next."""
    env = open()
    env.execute("trap 'echo poison' EXIT DEBUG ERR RETURN TERM; kept=1")
    result = env.execute("false; f() { :; }; f; echo $kept")
    assert (result.output, result.returncode) == ("1\n", 0)
    assert say(env, "trap -p") == ""


@case
def trap_lists_the_users_traps_and_no_other(open: Opener) -> None:
    """`trap` and `trap -p` know nothing of what hermitcrab does at the end."""
    env = open()
    assert say(env, "trap; trap -p; trap -p EXIT") == ""
    assert say(env, "trap 'echo a' EXIT; trap -p EXIT; trap - EXIT") == "trap -- 'echo a' EXIT"
    assert say(env, "trap 'echo b' USR1; trap") == "trap -- 'echo b' SIGUSR1"
    assert say(env, "trap 'echo c' EXIT; (trap); trap - EXIT") == "trap -- 'echo c' EXIT"


@case
def what_an_exit_trap_changes_may_be_lost_but_breaks_nothing(open: Opener) -> None:
    """A trap that changes directory or unsets everything leaves a session that works."""
    env = open()
    env.execute("trap 'cd /; unset kept; set -e; exec >/dev/null' EXIT; kept=1")
    works(env)


@each(
    {
        "a_program": ("exec sh -c 'echo replaced; exit 5'", "replaced\n", 5),
        "a_missing_program": ("exec no-such-program 2>/dev/null", "", 127),
        "true": ("exec true", "", 0),
        "another_shell": ("exec bash -c 'echo $$ >/dev/null; kept=2; exit 6'", "", 6),
    }
)
def exec_replaces_the_shell_and_nothing_else(open: Opener, example: tuple[str, str, int]) -> None:
    """`exec program` gives that program's output and status, and the session goes on."""
    command, prints, status = example
    env = open()
    say(env, "kept=1; cd /usr")
    result = env.execute(command)
    assert (result.output, result.returncode) == (prints, status)
    assert say(env, "echo $kept; pwd") == "1\n/usr"


@each({"KILL": 137, "TERM": 143, "HUP": 129, "SEGV": 139, "PIPE": 141})
def a_shell_killed_by_a_signal_is_told_as_such(open: Opener, code: int) -> None:
    """A signal that ends the shell gives 128 plus its number; the session keeps what it had."""
    env = open()
    say(env, "kept=1; cd /usr")
    result = env.execute(f"echo before; cd /; kept=2; ulimit -c 0; kill -{code - 128} $$; echo after")
    assert (result.output, result.returncode, result.outcome) == ("before\n", code, Outcome.COMPLETED)
    works(env)
    assert value(env, "kept") in ("1", "2")
    assert (value(env, "kept") == "1") == (env.cwd == "/usr")


@case
def a_command_runs_exactly_once(open: Opener) -> None:
    """Whatever happens to its shell, a command is not run a second time."""
    env = open()
    scratch(env)
    for ending in ("true", "exit 1", "kill -9 $$", "exec false", "trap 'exit 2' EXIT", "set -e; false"):
        env.execute(f"echo ran >>count; {ending}")
    assert say(env, "wc -l <count").strip() == "6"


@case
def many_commands_in_a_row_all_count(open: Opener) -> None:
    """A hundred commands, each on top of the one before."""
    env = open()
    for _ in range(100):
        env.execute("count=$((count + 1))")
    assert value(env, "count") == "100"
