"""A sandbox without an agent in it keeps the same promises."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hermitcrab
from hermitcrab.backends import registry
from hermitcrab.config import SessionConfig
from hermitcrab.core import plain
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.plain import text
from hermitcrab.core.plain.inputs import Inputs
from hermitcrab.core.plain.words import Word, Words, unescape
from hermitcrab.core.protocols import Backend, Health, Luggage, Traits
from hermitcrab.errors import SandboxLost, SandboxStartError, TransferError, UnsupportedCapability
from hermitcrab.policy.environment import inherited
from hermitcrab.testing import CASES, Case
from hermitcrab.testing.for_pytest import check, parameters

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

_NO_TERMINAL = "bash has no builtin that makes a terminal"
CANNOT: dict[str, str] = {
    "a_command_can_have_a_terminal": _NO_TERMINAL,
    "what_is_typed_is_echoed_and_read": _NO_TERMINAL,
    "a_terminal_can_be_resized": _NO_TERMINAL,
    "ctrl_c_on_a_terminal_interrupts_the_program": _NO_TERMINAL,
    "the_end_of_input_can_be_typed": _NO_TERMINAL,
    "a_terminal_command_is_one_of_the_session": _NO_TERMINAL,
    "an_interactive_shell_runs_on_a_terminal": _NO_TERMINAL,
    "a_full_screen_program_runs_on_a_terminal": _NO_TERMINAL,
    "usage_tells_time_and_memory": "bash does not tell what a program that it waited for has used",
}


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """This machine, entered by running a program on it."""


def enter(argv: Sequence[str]) -> ClientProgram:
    return ClientProgram(argv, inherited(SessionConfig(), os.environ))


async def start(config: PlainConfig, luggage: Luggage) -> AgentSandbox:
    return await plain.start("plain", enter)


BACKEND = Backend(
    name="plain",
    summary="this machine, without an agent",
    config=PlainConfig,
    traits=Traits(isolated=False, network="host", persistent=True, terminals=False, carries="same files"),
    start=start,
    check=lambda: Health(True, ""),
)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    offer = registry.Builtin("plain", __name__, BACKEND.summary)
    monkeypatch.setattr(registry, "BUILTINS", (*registry.BUILTINS, offer))


def opener(**options: Any) -> hermitcrab.Environment:
    return hermitcrab.open("plain", **options)


def tier(each: ParameterSet) -> list[pytest.MarkDecorator]:
    case = each.values[0]
    assert isinstance(case, Case)
    return [] if case.module in EVERYDAY else [pytest.mark.thorough]


EVERYDAY = {"state", "kills", "given", "files", "background", "concurrency", "streaming", "limits", "loss"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(*each.values, id=each.id, marks=[*each.marks, *tier(each)]) for each in parameters(CANNOT)],
)
def test_promise(case: Case, quiet_home: Path) -> None:
    check(case, opener)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name)
        for name, case in CASES.items()
        if name.startswith(("nothing_survives", "a_started_process_can", "other_commands_processes"))
    ],
)
def test_promise_where_no_limit_can_be_set(
    case: Case, monkeypatch: pytest.MonkeyPatch, quiet_home: Path
) -> None:
    """As in gVisor: what a process holds open has to tell whose it is."""

    def limited(argv: Sequence[str]) -> ClientProgram:
        return ClientProgram(["bash", "-c", 'ulimit -x 5; exec "$@"', "bash", *argv], os.environ)

    monkeypatch.setattr(f"{__name__}.enter", limited)
    check(case, opener)


def test_an_argv_holds_nothing_of_ours(monkeypatch: pytest.MonkeyPatch, quiet_home: Path) -> None:
    entered: list[Sequence[str]] = []

    def watched(argv: Sequence[str]) -> ClientProgram:
        entered.append(argv)
        return ClientProgram(argv, os.environ)

    monkeypatch.setattr(f"{__name__}.enter", watched)
    with opener(env={"TOKEN": "secret"}) as env:
        assert env.execute("echo $TOKEN; cat", stdin_data="secret").output == "secret\nsecret"
        env.files.write("file", "secret")
    assert len(entered) > 4
    assert set(entered) == {plain.FAR_END}


def test_what_a_client_program_says_before_it_is_there_is_nobodys_output(
    monkeypatch: pytest.MonkeyPatch, quiet_home: Path
) -> None:
    def noisy(argv: Sequence[str]) -> ClientProgram:
        banner = 'printf "Welcome\\0\\n"; echo "Warning: known hosts" >&2; exec "$@"'
        return ClientProgram(["bash", "-c", banner, "bash", *argv], os.environ)

    monkeypatch.setattr(f"{__name__}.enter", noisy)
    with opener() as env:
        assert env.execute("echo out; echo err >&2").output == "out\nerr\n"
        result = env.execute("echo out; echo err >&2; kept=1", separate=True)
        assert (result.stdout, result.stderr) == ("out\n", "err\n")
        assert env.execute("echo $kept").output == "1\n"


@pytest.mark.parametrize("separate", [False, True])
def test_a_command_that_kills_its_supervisor_ends_and_is_not_run_again(
    separate: bool, quiet_home: Path
) -> None:
    with opener() as env:
        command = "echo ran >>count; sleep 600 & echo $!; kill -9 $PPID; sleep 600"
        result = env.execute(command, separate=separate)
        assert result.returncode == 137
        assert not running(int(result.output.split()[0]))
        assert env.execute("cat count").output == "ran\n"


def test_a_command_that_kills_what_tells_its_state_ends_and_is_not_run_again(quiet_home: Path) -> None:
    siblings = "for p in $(pgrep -P $PPID); do test $p = $$ || kill -9 $p; done"
    with opener() as env:
        result = env.execute(f"echo ran >>count; sleep 600 & {siblings}; kept=1", separate=True, timeout=15)
        # It depends on who is quicker whether the shell still finds a reader for its state.
        assert result.returncode in (0, 128 + signal.SIGPIPE)
        assert env.execute("cat count").output == "ran\n"


def test_a_program_that_stops_before_anybody_waits_has_not_ended(
    monkeypatch: pytest.MonkeyPatch, quiet_home: Path
) -> None:
    def hesitating(*of: Any) -> bytes:
        ready = b"\nset +m\n"
        script = wrapper(*of)
        assert ready in script
        return script.replace(ready, b"\nsleep 0.3" + ready)

    wrapper = text.wrapper
    monkeypatch.setattr(text, "wrapper", hesitating)
    with opener(kill_grace=0.1) as env:
        assert env.execute("kill -STOP $$", timeout=1).outcome is hermitcrab.Outcome.TIMED_OUT


def test_a_keeper_that_was_killed_is_replaced(quiet_home: Path) -> None:
    with opener(kill_grace=0.1) as env:
        keeper = env._session.sandbox._link._keeper  # type: ignore[attr-defined]
        env.execute(f"kill -9 {keeper._client._popen.pid}")
        result = env.execute("setsid sleep 600 & echo $!; sleep 601", timeout=0.5)
        assert result.returncode == 124
        assert not running(int(result.output.split()[0]))


@pytest.fixture
def with_lifeline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sandbox's end is the end of a program of its own; returns what was done after it."""
    done: list[str] = []
    life = ClientProgram(
        plain.FAR_END, os.environ, release=lambda: done.append("released"), autopsy=lambda: "out of fuel"
    )

    async def start(config: PlainConfig, luggage: Luggage) -> AgentSandbox:
        return await plain.start("plain", enter, life)

    monkeypatch.setattr(f"{__name__}.BACKEND", replace(BACKEND, start=start))
    return done


def test_the_end_of_the_lifeline_is_the_end_of_the_sandbox(
    with_lifeline: list[str], quiet_home: Path
) -> None:
    with opener() as env:
        keeper = env._session.sandbox._link._keeper  # type: ignore[attr-defined]
        with pytest.raises(SandboxLost, match="out of fuel") as lost:
            env.execute(f"echo before; kill -9 {keeper._client._popen.pid}; sleep 600")
        assert lost.value.partial_output == "before\n"
        with pytest.raises(SandboxLost):
            env.execute("true")
    assert with_lifeline == ["released"]


def test_a_lifeline_that_cannot_be_had_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch, quiet_home: Path
) -> None:
    def missing(argv: Sequence[str]) -> ClientProgram:
        return ClientProgram(["bash", "-c", "echo 'no such container' >&2; exit 1"], os.environ)

    monkeypatch.setattr(f"{__name__}.enter", missing)
    with pytest.raises(SandboxStartError, match="no such container"):
        opener()


def test_nothing_outlives_a_killed_program(quiet_home: Path) -> None:
    script = (
        "import asyncio, os, sys\n"
        "from hermitcrab.core import plain\n"
        "from hermitcrab.core.client import ClientProgram\n"
        "async def main():\n"
        "    sandbox = await plain.start('plain', lambda argv: ClientProgram(argv, os.environ))\n"
        "    process = await sandbox.spawn(['bash', '-c', sys.argv[1]])\n"
        "    async for chunk in process.output():\n"
        "        os.write(1, chunk.data)\n"
        "asyncio.run(main())\n"
    )
    shell = "setsid sleep 600 & echo $!; (env -i setsid sleep 601 >/dev/null & echo $!); sleep 602"
    with subprocess.Popen([sys.executable, "-c", script, shell], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        pids = [int(host.stdout.readline()) for _ in range(2)]
        host.kill()
    deadline = time.monotonic() + 10
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline, "something is left"
        time.sleep(0.02)  # nobody tells a stranger of a process's end


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def bash_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A sandbox in which no program but bash can be found; returns what its profile must not change."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "bash").symlink_to(shutil.which("bash") or "/bin/bash")

    def enter(argv: Sequence[str]) -> ClientProgram:
        program = str(programs / argv[0])
        return ClientProgram([program, *argv[1:]], {"PATH": str(programs), "HOME": str(tmp_path)})

    monkeypatch.setattr(f"{__name__}.enter", enter)
    return {"PATH": str(programs)}


def test_bash_is_all_that_it_takes(bash_alone: dict[str, str], quiet_home: Path) -> None:
    with opener(kill_grace=0.1, env=bash_alone) as env:
        assert env.execute("type -P cat sleep").returncode == 1
        env.execute("kept=1; f() { echo f $kept; }")
        assert env.execute("f; read -r a; echo $a", stdin_data="in\n").output == "f 1\nin\n"
        result = env.execute("echo out; echo err >&2; kept=2", separate=True)
        assert (result.stdout, result.stderr) == ("out\n", "err\n")
        stay = "trap '' TERM; echo $BASHPID; while :; do read -r -t 1 -u 9; done"
        nap = f"exec 9<> <(:); ({stay}) & echo $kept; wait"
        result = env.execute(nap, timeout=0.5)
        assert result.returncode == 124
        pid, kept = sorted(map(int, result.output.split()[:2]), reverse=True)
        assert (kept, running(pid)) == (2, False)


def test_bash_alone_reads_any_bytes_and_says_why_it_cannot_write(
    bash_alone: dict[str, str], quiet_home: Path, tmp_path: Path
) -> None:
    data = bytes(range(256)) * 40 + b"\0\0"
    (tmp_path / "file").write_bytes(data)
    with opener() as env:
        assert env.files.read(str(tmp_path / "file")) == data
        with pytest.raises(TransferError, match="no mv in the sandbox"):
            env.files.write(str(tmp_path / "file"), b"new")
    assert (tmp_path / "file").read_bytes() == data


async def spawned(argv: Sequence[str], **options: Any) -> tuple[dict[int, bytes], int]:
    sandbox = await plain.start("plain", enter)
    try:
        process = await sandbox.spawn(argv, **options)
        output = {1: b"", 2: b""}
        async for channel, data in process.output():
            output[channel] += data
        return output, (await process.wait()).code
    finally:
        await sandbox.release()


def test_a_program_without_a_shell() -> None:
    output, code = asyncio.run(
        spawned(["sh", "-c", 'echo "$A $PWD"; env >&2; exit 7'], env={"A": "b  c\n'"}, cwd="/usr")
    )
    assert (output[1], code) == (b"b  c\n' /usr\n", 7)
    assert b"A=b  c" in output[2]
    assert b"PATH=" not in output[2]


def test_a_program_that_cannot_be_started() -> None:
    for argv, options, why in (
        (["no-such-program"], {}, "no-such-program: No such file"),
        (["/"], {}, "/: it cannot be executed"),
        (["true"], {"cwd": "/no/such/place"}, "cannot enter /no/such/place"),
        (["true"], {"env": {"a.b": "c"}}, "a.b"),
    ):
        with pytest.raises(SandboxStartError, match=re.escape(why)):
            asyncio.run(spawned(argv, **options))


def test_a_terminal_is_refused(quiet_home: Path) -> None:
    with opener() as env:
        with pytest.raises(UnsupportedCapability, match="no terminals"):
            env.stream("tty", terminal=(24, 80))
        assert env.execute("echo fine").output == "fine\n"


NONCE = b"0123456789abcdef"


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([b"\0", b"\0" + NONCE[:5]]))), st.data())
def test_words_are_told_from_output_however_the_stream_is_cut(
    outputs: list[bytes], data: st.DataObject
) -> None:
    outputs = [output for output in outputs if NONCE not in output]
    stream = b"".join(output + b"\0" + NONCE + b" word %d\n" % at for at, output in enumerate(outputs))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    words, printed, heard = Words(NONCE), b"", []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        for piece in words.feed(stream[begin:end]):
            if isinstance(piece, Word):
                heard.append(piece)
            else:
                printed += piece
    assert printed + words.flush() == b"".join(outputs)
    assert heard == [Word("word", b"%d" % at) for at in range(len(outputs))]


@given(st.lists(st.sampled_from([b"\\", b"n", b"0", b"\n", b"\0", b"x"])))
def test_what_a_relay_escapes_is_restored(pieces: list[bytes]) -> None:
    raw = b"".join(pieces)
    escaped = raw.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\0", b"\\0")
    assert unescape(escaped) == raw


def test_inputs_have_their_turn_in_order_and_their_credit_to_the_byte() -> None:
    inputs = Inputs([8, 7])
    assert inputs.preamble(b"12345") == b"12345"
    inputs.add(8, b"later")
    assert list(inputs.due()) == []
    assert not inputs.given
    inputs.add(7, b"now")
    assert list(inputs.due()) == [b"now"]
    inputs.close(7)
    inputs.close(8)
    over = [inputs.over, *inputs.due(), inputs.over]
    assert over == [False, b"later", True]
    assert list(inputs.taken(6)) == [(7, 1)]
    assert list(inputs.taken(100)) == [(7, 2), (8, 5)]
