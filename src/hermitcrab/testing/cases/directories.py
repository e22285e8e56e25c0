"""Where a command runs."""

from __future__ import annotations

from hermitcrab.result import Outcome
from hermitcrab.testing.inside import say, scratch, value, works
from hermitcrab.testing.suite import Opener, case, each

NAMES = {
    "blanks": "with two  blanks",
    "quotes": 'it\'s "quoted"',
    "line_break": "two\nlines",
    "trailing_blank": "trailing ",
    "trailing_line_break": "trailing\n",
    "many_trailing_line_breaks": "trailing\n\n\n",
    "leading_dash": "-dash",
    "dash": "-",
    "double_dash": "--",
    "dollar": "$HOME `x` $(x)",
    "glob": "*?[a]",
    "backslash": "back\\slash\\",
    "unicode": "krabbe é 中 🦀",
    "not_utf8": "bad\udcff\udc80",
    "tilde": "~",
    "control": "\x01\x7f\x1b",
    "hash_and_bang": "#!&;|<>",
    "dots": "...",
    "long": "n" * 250,
}


@each(NAMES)
def a_directory_of_any_name_is_remembered(open: Opener, name: str) -> None:
    """`cd` into a directory of whatever name, and the next command is in it."""
    env = open()
    base = scratch(env)
    env.execute(
        'IFS= read -r -d "" name; mkdir -- "./$name" && cd "./$name" && : >here', stdin_data=name + "\0"
    )
    assert env.cwd == f"{base}/{name}"
    assert say(env, "ls; unset name") == "here"
    say(env, "cd /")
    assert say(env, 'ls; cd "$OLDPWD"', cwd=f"{base}/{name}") == "here"


@case
def a_command_starts_in_the_cwd_that_it_is_given(open: Opener) -> None:
    """`cwd=` is as a `cd` before the command, and stays."""
    env = open()
    say(env, "cd /")
    assert say(env, "pwd", cwd="/usr") == "/usr"
    assert env.cwd == "/usr"
    assert say(env, "pwd; echo $OLDPWD") == "/usr\n/"
    assert say(env, "cd /etc; pwd", cwd="/") == "/etc"
    assert env.cwd == "/etc"


@case
def a_tilde_is_the_home_directory(open: Opener) -> None:
    """`cwd` takes `~` and `~/dir`, by the HOME of the session."""
    env = open()
    base = scratch(env)
    say(env, f"export HOME={base}; mkdir -p in/side; cd /")
    assert say(env, "pwd", cwd="~") == base
    assert say(env, "pwd", cwd="~/in/side") == f"{base}/in/side"


@case
def a_relative_cwd_is_relative_to_the_session(open: Opener) -> None:
    """`cwd` without a leading slash starts where the session is."""
    env = open()
    base = scratch(env)
    say(env, "mkdir -p a/b")
    assert say(env, "pwd", cwd="a") == f"{base}/a"
    assert say(env, "pwd", cwd="b") == f"{base}/a/b"
    assert say(env, "pwd", cwd="../..") == base
    assert say(env, "pwd", cwd="./a/../a") == f"{base}/a"


@each(
    {
        "missing": "/no/such/place",
        "relative": "nowhere",
        "home": "~/nowhere",
        "a_file": "/etc/passwd",
        "long": "/x" * 3000,
    }
)
def a_missing_directory_is_126_and_runs_nothing(open: Opener, cwd: str) -> None:
    """A directory that cannot be entered answers 126, says which, and the command is not run."""
    env = open()
    base = scratch(env)
    say(env, "kept=1")
    result = env.execute(f"touch {base}/ran; kept=2; echo ran", cwd)
    assert (result.returncode, result.outcome) == (126, Outcome.NOT_RUN)
    assert cwd.lstrip("~/")[:100] in result.output
    assert "ran\n" not in result.output
    assert env.cwd == base
    assert value(env, "kept") == "1"
    assert say(env, "ls; pwd") == base


@case
def a_symbolic_link_is_resolved(open: Opener) -> None:
    """What is remembered is the physical directory."""
    env = open()
    base = scratch(env)
    say(env, "mkdir real; ln -s real link; cd link")
    assert env.cwd == f"{base}/real"
    assert say(env, "cd ..; pwd") == base


@case
def a_deleted_directory_is_reported_and_the_session_recovers(open: Opener) -> None:
    """When the session's directory is gone the command says so and does not run; the next one does."""
    env = open()
    base = scratch(env)
    say(env, f"mkdir -p a/b/c; cd a/b/c; kept=1; rm -r {base}/a/b")
    result = env.execute("echo ran; kept=2")
    assert (result.returncode, result.outcome) == (126, Outcome.NOT_RUN)
    assert f"{base}/a/b/c" in result.output
    assert "ran\n" not in result.output
    works(env)
    assert env.cwd == f"{base}/a"
    assert value(env, "kept") == "1"


@case
def a_deleted_directory_can_be_left_with_cwd(open: Opener) -> None:
    """A command that names its own directory does not care that the session's is gone."""
    env = open()
    base = scratch(env)
    say(env, f"mkdir gone; cd gone; rmdir {base}/gone")
    assert say(env, "pwd", cwd="/usr") == "/usr"
    assert env.cwd == "/usr"


@case
def a_directory_deleted_by_its_own_command_keeps_the_state(open: Opener) -> None:
    """A command that deletes the directory it is in is remembered in everything else."""
    env = open()
    scratch(env)
    result = env.execute('mkdir d; cd d; rmdir "$PWD"; kept=1; fn() { echo fn; }; exit 3')
    assert result.returncode == 3
    env.execute("true")
    assert say(env, "echo $kept; fn") == "1\nfn"


@case
def a_very_deep_directory_is_remembered(open: Opener) -> None:
    """A path beyond 4096 bytes does not break the session."""
    env = open()
    scratch(env)
    env.execute(
        'for i in {1..25}; do mkdir "$(printf %0200d $i)" && cd "$_" || exit 1; done; kept=1', timeout=20
    )
    env.execute("true")
    works(env)
    assert value(env, "kept") == "1"
