"""What a command prints, and what is kept of it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from hermitcrab.result import Result
from hermitcrab.testing.inside import PATIENCE, say, works
from hermitcrab.testing.suite import Inapplicable, Opener, case, each

MB = 1 << 20


@case
def stdout_and_stderr_come_in_order(open: Opener) -> None:
    """Without `separate`, what was printed first is first, whichever stream it went to."""
    env = open()
    result = env.execute("for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done")
    assert result.output == "".join(f"out {i}\nerr {i}\n" for i in range(1, 6))
    assert result.stdout is None
    assert result.stderr is None


@case
def stdout_and_stderr_come_apart_when_asked_for(open: Opener) -> None:
    """With `separate=True` each stream is whole and by itself."""
    env = open()
    result = env.execute("for i in 1 2; do echo out $i; echo err $i >&2; done", separate=True)
    assert (result.stdout, result.stderr) == ("out 1\nout 2\n", "err 1\nerr 2\n")
    assert result.output == "out 1\nout 2\nerr 1\nerr 2\n"
    assert env.execute("echo a; echo b >&2").output == "a\nb\n"
    assert env.execute("true", separate=True).stderr == ""


@case
def a_character_cut_in_two_is_put_together(open: Opener) -> None:
    """UTF-8 that arrives in pieces is decoded as a whole."""
    env = open()
    result = env.execute("printf '\\xf0\\x9f'; sleep 0.05; printf '\\xa6'; sleep 0.05; printf '\\x80'")
    assert result.output == "\U0001f980"


@case
def what_is_not_utf8_is_replaced(open: Opener) -> None:
    """Bytes that are no text become U+FFFD; nothing around them is lost."""
    env = open()
    assert env.execute("printf 'a\\xff\\xfeb\\xc3'").output == "a\ufffd\ufffdb\ufffd"


@case
def output_is_not_changed(open: Opener) -> None:
    """No line break is added, removed or translated."""
    env = open()
    for text in ("no newline", "\n", "\n\n", "a\r\nb\rc", "  x  ", "\x1b[31mred\x1b[0m\t", "\ufeffbom"):
        assert env.execute("cat", stdin_data=text).output == text


@case
def binary_output_is_announced_and_saved(open: Opener) -> None:
    """Output with NUL bytes is not shown but named, with its size and where all of it is."""
    env = open()
    result = env.execute("printf 'PNG\\0\\1\\2\\377'")
    assert result.output.startswith("[Binary output: 7 bytes")
    assert result.output_path is not None
    assert str(result.output_path) in result.output
    assert result.output_path.read_bytes() == b"PNG\0\1\2\xff"


def _check_spilled(output: str, path: Path | None, expected: bytes, limit: int) -> None:
    assert path is not None
    kept = path.read_bytes()
    assert len(kept) == len(expected)
    assert hashlib.sha256(kept).digest() == hashlib.sha256(expected).digest()
    assert output.startswith(expected[: limit // 2 - 10].decode())
    assert output.endswith(expected[-limit // 2 + 10 :].decode())
    assert str(path) in output
    assert len(output) < limit + 500


@case
def long_output_is_kept_in_a_file(open: Opener) -> None:
    """Beyond the limit, head and tail are shown and all of it is in a file that the result names."""
    env = open(output_limit=4096)
    result = env.execute("seq 100000")
    assert result.truncated
    _check_spilled(
        result.output, result.output_path, "".join(f"{i}\n" for i in range(1, 100001)).encode(), 4096
    )


@case
def long_output_of_both_streams_is_kept(open: Opener) -> None:
    """Apart, each long stream is in a file of its own, and each text names it."""
    env = open(output_limit=4096)
    result = env.execute("seq 20000; seq 30000 60000 >&2", separate=True)
    assert result.truncated
    for text, numbers in ((result.stdout, range(1, 20001)), (result.stderr, range(30000, 60001))):
        assert text is not None
        found = re.search(r"the complete output is in (.*) \.\.\.\]", text)
        assert found is not None
        _check_spilled(text, Path(found[1]), "".join(f"{i}\n" for i in numbers).encode(), 4096)


@each({"below": 4095, "at": 4096, "above": 4097})
def the_limit_is_exact(open: Opener, size: int) -> None:
    """Output up to the limit is whole; one byte more is not."""
    env = open(output_limit=4096)
    result = env.execute(f"printf %0{size}d 7")
    assert result.truncated == (size > 4096)
    if not result.truncated:
        assert result.output == "7".rjust(size, "0")
        assert result.output_path is None


@case
def a_long_output_of_wide_characters_is_cut_between_them(open: Opener) -> None:
    """Head and tail of a cut output hold whole characters only."""
    env = open(output_limit=1001)
    result = env.execute("for i in {1..2000}; do printf 🦀; done")
    assert result.truncated
    assert "\ufffd" not in result.output


@case
def memory_does_not_grow_with_output(open: Opener) -> None:
    """100 MB of output cost less than 32 MiB of memory, and every byte is in the file."""
    env = open()
    env.execute("head -c 3000000 /dev/zero | tr '\\0' x")
    command = "head -c 100000000 /dev/zero | tr '\\0' x"
    grown, result = _growth(lambda: env.execute(command, timeout=5 * PATIENCE))
    assert result.output_path is not None
    assert result.output_path.stat().st_size == 100_000_000
    result.output_path.unlink()
    assert grown < 32 * MB, f"{grown / MB:.1f} MiB"


def _growth(action: Callable[[], Result]) -> tuple[int, Result]:
    """By how much the most memory that this program ever held grew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = _peak()
        result = action()
        return _peak() - before, result
    except OSError:
        raise Inapplicable("this system does not tell a program's peak of memory") from None


def _peak() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


@case
def a_loud_command_does_not_hold_up_another(open: Opener) -> None:
    """While one command prints without end, others answer."""
    env = open(output_limit=4096)
    loud = env.stream("yes")
    for _ in range(5):
        assert env.execute("echo quiet", timeout=PATIENCE).output == "quiet\n"
    loud.kill(grace=0)
    loud.wait(PATIENCE)
    works(env)


@case
def many_lines_arrive_complete(open: Opener) -> None:
    """Two hundred thousand lines below the limit are all there."""
    env = open(output_limit=4 * MB)
    assert env.execute("seq 200000").output == "".join(f"{i}\n" for i in range(1, 200001))


@case
def the_last_words_of_a_pipeline_are_not_lost(open: Opener) -> None:
    """What the shell's own programs print last is in the output, every time."""
    env = open()
    for _ in range(20):
        assert say(env, "seq 3 | while read -r n; do echo $n; done | tail -n 1") == "3"
        assert env.execute("head -c 70000 /dev/zero | tr '\\0' x; echo end").output.endswith("xend\n")
