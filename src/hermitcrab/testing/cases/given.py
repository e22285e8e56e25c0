"""What is given to a command: its text and its input."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from hermitcrab.testing.inside import PATIENCE, host_processes, raised, read_until, say, value, works
from hermitcrab.testing.suite import Opener, case, each

MB = 1 << 20


@case
def a_command_of_megabytes_runs(open: Opener) -> None:
    """A command may be 3 MB long."""
    env = open()
    text = 'it\'s a line of text, with \\ and \u00e9 and $HOME in "it"\n' * (3 * MB // 58)
    quoted = text.replace("'", "'\\''")
    result = env.execute(f"big='{quoted}'; LC_ALL=C; printf %s \"$big\" | md5sum; unset big LC_ALL")
    assert result.output.split()[0] == hashlib.md5(text.encode()).hexdigest()
    works(env)


@case
def a_state_of_megabytes_is_remembered(open: Opener) -> None:
    """A variable of 3 MB is a variable like any other."""
    env = open()
    env.execute("big=$(printf %03000000d 7)")
    assert say(env, "echo ${#big} ${big: -3}") == "3000000 007"
    works(env)
    assert say(env, "unset big; echo ${big-gone}") == "gone"


@case
def a_nul_byte_in_a_command_is_refused(open: Opener) -> None:
    """What no shell can take is a ValueError, and nothing is run."""
    env = open()
    for arguments in (("echo a\0b",), ("pwd", "/usr\0")):
        assert "NUL" in str(raised(ValueError, partial(env.execute, *arguments)))
    works(env)


@each(
    {
        "command": {"command": "echo \ud800"},
        "cwd": {"command": "pwd", "cwd": "/\ud800"},
        "stdin": {"command": "cat", "stdin_data": "\ud800"},
    }
)
def text_that_cannot_be_encoded_is_refused(open: Opener, arguments: dict[str, Any]) -> None:
    """A lone surrogate is a ValueError at once, never a hang."""
    env = open()
    raised(ValueError, lambda: env.execute(**arguments))
    works(env)


@case
def a_command_is_text(open: Opener) -> None:
    """Anything but text as a command is a TypeError."""
    env = open()
    wrong: Any
    for wrong in (b"true", None, ["true"]):
        raised(TypeError, partial(env.execute, wrong))
    works(env)


@each({"0": 0, "1": 1, "65536": 65536, "256KB": 1 << 18, "1MB": MB, "10MB_and_1": 10 * MB + 1})
def input_arrives_to_the_byte(open: Opener, size: int) -> None:
    """stdin of any size and of any bytes arrives exactly."""
    data = random.Random(size).randbytes(size)
    env = open()
    result = env.execute("md5sum", stdin_data=data)
    assert result.output.split()[0] == hashlib.md5(data).hexdigest()


@case
def input_as_text_is_encoded_and_nothing_else(open: Opener) -> None:
    """Text on stdin is UTF-8, without a line break added or changed."""
    env = open()
    text = "no newline\r\n\u00e9\U0001f980 \\n $HOME 'end"
    assert env.execute("od -An -v -tx1 | tr -d ' \\n'", stdin_data=text).output == text.encode().hex()
    assert env.execute("wc -c", stdin_data=b"abc").output.strip() == "3"


@each({"1MB": MB, "10MB": 10 * MB})
def unread_input_is_no_trouble(open: Opener, size: int) -> None:
    """A command that reads nothing, or a little, ends as it would have."""
    env = open()
    data = b"line\n" * (size // 5)
    assert env.execute("true", stdin_data=data, timeout=PATIENCE).returncode == 0
    assert env.execute("head -n 1", stdin_data=data, timeout=PATIENCE).output == "line\n"
    assert env.execute("exec <&-; echo closed", stdin_data=data, timeout=PATIENCE).output == "closed\n"
    assert say(env, "cat") == ""


@case
def without_input_a_command_reads_the_end_at_once(open: Opener) -> None:
    """A command that is given no stdin finds it empty, not ours and not a terminal."""
    env = open()
    assert say(env, "cat; test -t 0 || echo none; read -r line || echo end") == "none\nend"


@case
def input_is_shared_by_the_commands_programs_in_turn(open: Opener) -> None:
    """What one program leaves of stdin, the next one reads."""
    env = open()
    assert (
        say(env, "read -r a; read -r b; echo $b $a; cat", stdin_data="one\ntwo\nthree\n") == "two one\nthree"
    )


@case
def input_is_not_taken_for_a_command(open: Opener) -> None:
    """stdin is data: nothing in it is run, before, in or after the command."""
    env = open()
    say(env, ":", stdin_data="exit 9\necho injected\n")
    assert say(env, "cat >/dev/null", stdin_data="exit 9\necho injected\n") == ""
    works(env)


@case
def input_in_a_loop_and_output_at_once_do_not_block(open: Opener) -> None:
    """Megabytes in and out at the same time do not wait for each other."""
    env = open(output_limit=4096)
    data = random.Random(1).randbytes(3 * MB).hex().encode()
    result = env.execute("cat", stdin_data=data, timeout=PATIENCE)
    assert result.output_path is not None
    assert result.output_path.read_bytes() == data


@case
def env_option_is_in_the_sessions_environment(open: Opener) -> None:
    """`env=` variables are exported from the first command on, to the byte."""
    env = open(env={"GIVEN": "a 'b'\n$c \\", "EMPTY": "", "UNICODE": "é"})
    assert env.execute('printf %s "$GIVEN"; env | grep -c -e ^GIVEN= -e ^EMPTY=').output == "a 'b'\n$c \\2\n"
    assert value(env, "UNICODE") == "é"
    say(env, "unset GIVEN")
    assert say(env, "echo ${GIVEN-gone}") == "gone"


@contextmanager
def host_variables(**variables: str) -> Iterator[None]:
    """This program's own environment, for a while."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]


@case
def a_secret_of_the_host_does_not_arrive(open: Opener) -> None:
    """No command has a secret of the host's environment, nor has what started it."""
    url = "postgres://me:unasked@host/db"
    with host_variables(HC_CASE_API_KEY="unasked", HC_CASE_URL=url, LC_HC_CASE="elsewhere"):
        env = open()
        seen = say(
            env,
            "env; set; for p in $PPID $(sed 's/.*) . //; s/ .*//' /proc/$PPID/stat); "
            "do tr '\\0' '\\n' </proc/$p/environ; done 2>/dev/null; true",
        )
    assert "unasked" not in seen
    # A sandbox that is the host inherits the rest.
    assert env.traits.isolated is ("LC_HC_CASE=elsewhere" not in seen)


@case
def a_forwarded_variable_is_the_hosts_of_that_moment(open: Opener) -> None:
    """What was named arrives as it is on the host now; it is gone when revoked, and kept nowhere."""
    first, show = "first 'hc-forwarded'\n$HOME", 'printf %s "${HC_FORWARDED-none}"'
    with host_variables(HC_FORWARDED=first):
        env = open(forward_env=["HC_FORWARDED", "HC_OWN", "HC_FORWARDED"], env={"HC_OWN": "own"})
        assert say(env, show + "; env | grep -c ^HC_FORWARDED=; echo $HC_OWN") == first + "1\nown"
        say(env, "export HC_FORWARDED=mine HC_OWN=mine; readonly HC_FORWARDED")
        assert say(env, show + "; echo $HC_OWN") == first + "own"
        os.environ["HC_FORWARDED"] = "second-hc-forwarded"
        running = env.stream(show + "; read -r line", stdin=True)
        read_until(running, "second-hc-forwarded")
        assert not [line for line in host_processes().values() if "hc-forwarded" in line]
        del os.environ["HC_FORWARDED"]
        running.write("\n")
        assert running.wait(PATIENCE).returncode == 0
        assert say(env, show) == "none"
    saved = env.state.to_json()
    assert "HC_FORWARDED" not in saved
    assert "HC_OWN" not in saved


@case
def what_is_carried_can_be_read_and_not_changed(open: Opener) -> None:
    """Credentials, skills and caches are there to be read; whatever a command does, the host's stay."""
    with tempfile.TemporaryDirectory() as made:
        host = Path(made)
        token, tool, wheel = (
            host / "home/.config/tool/token",
            host / "my skill/tool.sh",
            host / "cache/a/wheel",
        )
        for path in (token, tool, wheel):
            path.parent.mkdir(parents=True)
            path.write_text(path.name)
        token.chmod(0o600)
        env = open(
            credentials=[".config/tool/token"],
            credential_home=host / "home",
            skills=[host / "my skill"],
            caches=[host / "cache"],
        )
        items = {item.name: item for item in env.carried()}
        inside = [
            items[".config/tool/token"].path,
            items["skills/my skill"].path + "/tool.sh",
            items["caches/cache"].path + "/a/wheel",
        ]
        for name in inside:
            assert say(env, f"cat {quote(name)}") == name.rpartition("/")[2]
            if env.traits.carries == "mounts":
                assert env.execute(f"echo changed >{quote(name)}").returncode == 1
            if env.traits.carries != "same files":
                env.execute(f"chmod 777 {quote(name)}; echo changed >{quote(name)}; rm -f {quote(name)}")
        say(env, "mkdir -p ~/.config/other && touch ~/.config/other/file && rm -r ~/.config/other")
        env.cleanup()
        for path in (token, tool, wheel):
            assert path.read_text() == path.name
        assert token.stat().st_mode & 0o777 == 0o600
