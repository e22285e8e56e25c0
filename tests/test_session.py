"""What is particular to this machine: login profiles, threads, signals, the two faces of the API."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import AsyncEnvironment, AsyncRunningCommand, Environment, RunningCommand
from hermitcrab.errors import ConfigError, HermitcrabWarning
from hermitcrab.testing.inside import alive, own_children, pids_in, read_until, say, value, works

SOURCE = Path(hermitcrab.__file__).parent.parent


def profile(home: Path, text: str, name: str = ".bash_profile") -> None:
    (home / name).write_text(text)


def test_a_login_profile_is_read(quiet_home: Path) -> None:
    profile(
        quiet_home,
        'export FROM_PROFILE=1; plain=2; PATH="$HOME/bin:$PATH"; alias hi="echo hello"; f() { echo f; }; '
        "umask 027; shopt -s globstar; set -o pipefail\n",
    )
    with hermitcrab.open("local") as env:
        assert say(env, "echo $FROM_PROFILE $plain; hi; f; umask; shopt -q globstar && echo on") == (
            "1 2\nhello\nf\n0027\non"
        )
        assert env.state.environ["PATH"].startswith(f"{quiet_home}/bin:")
        assert "pipefail" in env.state.options


@pytest.mark.parametrize("name", [".bash_profile", ".bash_login", ".profile"])
def test_the_profile_is_found_where_bash_finds_it(quiet_home: Path, name: str) -> None:
    profile(quiet_home, "export WHICH=1\n", name)
    with hermitcrab.open("local") as env:
        assert say(env, "echo $WHICH") == "1"


def test_only_the_first_profile_is_read(quiet_home: Path) -> None:
    profile(quiet_home, "export ONE=1\n", ".bash_profile")
    profile(quiet_home, "export TWO=1\n", ".profile")
    with hermitcrab.open("local") as env:
        assert say(env, "echo $ONE ${TWO-none}") == "1 none"


@pytest.mark.parametrize(
    "text",
    [
        "export kept=1; echo printed; echo printed >&2; cat",
        "export kept=1; false",
        "export kept=1; no-such-program; cd /nonexistent",
        "export kept=1; set -e; false; export after=1",
        "export kept=1; set -u; echo $nothing_here",
        "export kept=1; set -x; true",
        "export kept=1; exit 3",
        "export kept=1; return 3; export after=1",
        "export kept=1; trap 'echo bye; exit 4' EXIT",
        "export kept=1; cd /usr; exec 2>/dev/null",
        "export kept=1\nif",
        "export kept=1; builtin() { :; }; printf() { :; }; exit() { :; }",
        "export kept=1; sleep 600 &",
        "export kept=1; unset PATH",
    ],
)
def test_a_strange_profile_does_not_break_the_session(quiet_home: Path, text: str) -> None:
    profile(quiet_home, text + "\n")
    with hermitcrab.open("local") as env:
        works(env)
        assert "printed" not in say(env, "echo nothing")
        assert say(env, "ls -d /") == "/"
        assert not env.state.options & {"errexit", "nounset", "xtrace"}
        assert "after" not in env.state.variables
        assert value(env, "kept") == "1"


@pytest.mark.parametrize(
    "text", ["exec true", "set -n", "exec sleep 1000 </dev/null", "kill -9 $$", "exec >&- 247>&-; exec true"]
)
def test_a_profile_that_takes_its_shell_away_is_said(quiet_home: Path, text: str) -> None:
    profile(quiet_home, text + "\n")
    with pytest.warns(HermitcrabWarning, match="login profile"):
        env = hermitcrab.open("local", login_timeout=1)
    with env:
        works(env)
        assert "/bin" in env.state.environ["PATH"]


def test_a_profile_that_hangs_is_bounded(quiet_home: Path) -> None:
    profile(quiet_home, "export before=1; sleep 1000; export after=1\n")
    started = time.monotonic()
    with pytest.warns(HermitcrabWarning, match="did not end within 1 s"):
        env = hermitcrab.open("local", login_timeout=1)
    assert time.monotonic() - started < 20
    with env:
        works(env)
        assert "/bin" in env.state.environ["PATH"]
        assert say(env, "type -P ls") != ""


def test_the_environment_is_the_callers(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FROM_HERE", "a 'b'\n")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for agent in ("c", "python"):
        monkeypatch.setenv("HERMITCRAB_AGENT", agent)
        with hermitcrab.open("local") as env:
            assert env.state.environ["FROM_HERE"] == "a 'b'\n"
            assert "PYTHONPATH" not in env.state.environ


def test_a_wrong_cwd_is_the_openers_error(quiet_home: Path) -> None:
    children = own_children()
    with pytest.raises(ConfigError, match="cwd"):
        hermitcrab.open("local", cwd="/no/such/place")
    assert own_children() <= children
    with hermitcrab.open("local", cwd="~") as env:
        assert env.cwd == os.path.realpath(quiet_home)


def test_threads_do_not_grow_with_environments(quiet_home: Path) -> None:
    def use(env: Environment) -> int:
        return sum(env.execute("true").returncode for _ in range(3))

    with hermitcrab.open("local") as env:
        works(env)
        environments = [hermitcrab.open("local") for _ in range(8)]
        few = threading.active_count()
        environments += [hermitcrab.open("local") for _ in range(24)]
        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(use, environments)) == 0
        del pool
        many = threading.active_count()
        for each in environments:
            each.cleanup()
    assert many <= few


FACES = [(Environment, AsyncEnvironment), (RunningCommand, AsyncRunningCommand)]
SPELLED = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__"}


def _public(face: type) -> dict[str, Any]:
    wanted = set(SPELLED) | set(SPELLED.values())
    return {
        name: member
        for name, member in inspect.getmembers(face)
        if not name.startswith("_") or name in wanted
    }


@pytest.mark.parametrize(("sync", "other"), FACES)
def test_both_faces_offer_the_same(sync: type, other: type) -> None:
    mine, theirs = _public(sync), _public(other)
    assert {SPELLED.get(name, name) for name in mine} == set(theirs)
    for name, member in mine.items():
        twin = theirs[SPELLED.get(name, name)]
        assert isinstance(member, property) == isinstance(twin, property), name
        if isinstance(member, property):
            assert inspect.getdoc(member) == inspect.getdoc(twin), name
        elif not name.startswith("__"):
            assert list(inspect.signature(member).parameters.values()) == list(
                inspect.signature(twin).parameters.values()
            ), name
            assert inspect.getdoc(member) == inspect.getdoc(twin), name


def test_both_faces_give_the_same(quiet_home: Path) -> None:
    async def through_asyncio() -> list[Any]:
        async with hermitcrab.aopen("local") as env:
            await env.execute("v=1; cd /usr")
            result = await env.execute("echo $v; pwd; echo e >&2; exit 3", separate=True)
            streamed = [piece async for piece in env.stream("echo a")]
            process = env.start("cat")
            await process.write("in")
            listed = [each.command for each in env.processes()]
            process.close_stdin()
            ended = await process.wait()
            return [result.stdout, result.stderr, result.returncode, streamed, listed, ended.output, env.cwd]

    with hermitcrab.open("local") as env:
        env.execute("v=1; cd /usr")
        result = env.execute("echo $v; pwd; echo e >&2; exit 3", separate=True)
        streamed = list(env.stream("echo a"))
        process = env.start("cat")
        process.write("in")
        listed = [each.command for each in env.processes()]
        process.close_stdin()
        ended = process.wait()
        mine = [result.stdout, result.stderr, result.returncode, streamed, listed, ended.output, env.cwd]
    assert mine == asyncio.run(through_asyncio())


def test_ctrl_c_in_execute_ends_the_command(quiet_home: Path) -> None:
    """In a program of its own, because the signal must find its main thread waiting."""
    text = (
        "import hermitcrab, sys, threading, _thread, pathlib, time\n"
        "env = hermitcrab.open('local', kill_grace=0.1)\n"
        "ready = pathlib.Path('ready')\n"
        "def press():\n"
        "    while not ready.exists() or not ready.read_text(): time.sleep(0.01)\n"
        "    __import__('os').kill(__import__('os').getpid(), 2)\n"
        "threading.Thread(target=press, daemon=True).start()\n"
        "try:\n"
        "    env.execute('setsid sleep 600 & echo $! >ready; sleep 601')\n"
        "except KeyboardInterrupt:\n"
        "    pid = int(ready.read_text())\n"
        "    print('interrupted', env.execute(f'kill -0 {pid} 2>/dev/null; echo $?').output.strip())\n"
        "env.cleanup()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "interrupted 1\n", done.stderr


async def _cancel_a_command() -> tuple[list[int], str]:
    async with hermitcrab.aopen("local", kill_grace=0.1) as env:
        await env.execute("mkfifo ready")
        task = asyncio.create_task(env.execute("setsid sleep 600 & echo $! >ready; sleep 601"))
        (pid,) = pids_in((await env.execute("cat ready")).output)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if (await env.execute(f"kill -0 {pid} 2>/dev/null")).returncode:
                pid = 0
                break
            await asyncio.sleep(0.02)
        return [pid], (await env.execute("echo here")).output


def test_cancelling_execute_ends_the_command(quiet_home: Path) -> None:
    assert asyncio.run(_cancel_a_command()) == ([0], "here\n")


def test_an_asyncio_timeout_ends_the_command(quiet_home: Path) -> None:
    async def go() -> str:
        async with hermitcrab.aopen("local", kill_grace=0.1) as env:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await env.execute("sleep 600")
            return (await env.execute("echo here")).output

    assert asyncio.run(go()) == "here\n"


def test_many_async_commands_at_once(quiet_home: Path) -> None:
    async def go() -> list[str]:
        async with hermitcrab.aopen("local") as env:
            results = await asyncio.gather(
                *(env.execute(f"echo {number}; v{number}=1") for number in range(20))
            )
            assert all(f"v{number}" in env.state.variables for number in range(20))
            return [result.output for result in results]

    assert asyncio.run(go()) == [f"{number}\n" for number in range(20)]


def test_a_dropped_environment_warns_and_its_processes_end(quiet_home: Path) -> None:
    children = own_children()
    env = hermitcrab.open("local")
    (pid,) = pids_in(say(env, "setsid sleep 600 & echo $!"))
    holder = [env]
    del env
    with pytest.warns(ResourceWarning, match="without cleanup"):
        _drop(holder)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and (
        Path(f"/proc/{pid}").exists() or _living(own_children() - children)
    ):
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()
    assert not _living(own_children() - children)


def _drop(holder: list[Environment]) -> None:
    holder.clear()
    gc.collect()


def _living(pids: set[int]) -> list[int]:
    """Not yet waited for is dead all the same: nobody is left who could."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def test_the_programs_end_is_the_sandboxs_end(quiet_home: Path) -> None:
    """Killed without a chance to clean up, a program leaves nothing behind."""
    text = (
        "import hermitcrab, os\n"
        "env = hermitcrab.open('local')\n"
        "print(env.execute('setsid sleep 600 & echo $!').output.strip(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", text],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    pid = int(done.stdout)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and _living({pid}):
        time.sleep(0.02)
    assert not _living({pid})


def test_the_synchronous_api_refuses_its_own_loop(quiet_home: Path) -> None:
    from hermitcrab.core import loop

    async def wrong() -> None:
        hermitcrab.open("local")

    with pytest.raises(RuntimeError, match="aopen"):
        loop.run(wrong())


def test_a_forked_child_can_open_its_own(quiet_home: Path) -> None:
    with hermitcrab.open("local") as env:
        works(env)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with hermitcrab.open("local") as mine:
                    status = 0 if mine.execute("echo child").output == "child\n" else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        works(env)


def _modules_after(statement: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_importing_is_light() -> None:
    imported = _modules_after("import hermitcrab") - _modules_after("pass")
    heavy = {
        "asyncio",
        "json",
        "platformdirs",
        "pytest",
        "hypothesis",
        "tomllib",
        "subprocess",
        "importlib.metadata",
    }
    assert not imported & heavy
    assert len([name for name in imported if name.startswith("hermitcrab")]) <= 2


def test_the_suite_needs_no_pytest() -> None:
    assert not _modules_after("import hermitcrab.testing, hermitcrab.testing.mutants") & {
        "pytest",
        "_pytest",
        "hypothesis",
    }


def test_every_public_name_is_there() -> None:
    for name in hermitcrab.__all__:
        assert getattr(hermitcrab, name) is not None
    with pytest.raises(AttributeError):
        _ = hermitcrab.nonsense


def test_an_idle_session_lets_its_shell_go(quiet_home: Path) -> None:
    with hermitcrab.open("local", warm_seconds=0.2) as env:
        works(env)
        deadline = time.monotonic() + 15
        while env._session._shells._warm is not None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert env._session._shells._warm is None
        works(env)


def test_without_a_shell_kept_ready_all_is_the_same(quiet_home: Path) -> None:
    with hermitcrab.open("local", warm_seconds=0) as env:
        say(env, "v=1")
        assert say(env, "echo $v") == "1"
        running = env.stream("echo up; cat", stdin=True)
        read_until(running, "up")
        running.close_stdin()
        assert running.wait(15).returncode == 0


@pytest.mark.filterwarnings("ignore::hermitcrab.errors.HermitcrabWarning")
def test_another_shell_than_bash_is_an_error(quiet_home: Path) -> None:
    for shell in ("/no/such/bash", "/bin/true"):
        children = own_children()
        with pytest.raises(hermitcrab.SandboxStartError):
            hermitcrab.open("local", shell=shell)
        assert own_children() <= children


def test_processes_of_other_sessions_are_spared(quiet_home: Path) -> None:
    one, two = hermitcrab.open("local"), hermitcrab.open("local")
    (pid,) = pids_in(say(one, "sleep 600 & echo $!"))
    two.cleanup()
    assert alive(one, pid) == [pid]
    one.cleanup()


def test_a_callback_error_does_not_lose_a_command(quiet_home: Path) -> None:
    """A full spill directory is the result's business, not the loop's."""
    unwritable: Callable[[], Path] = lambda: Path("/proc/nowhere")  # noqa: E731
    with hermitcrab.open("local", output_limit=100, spill_dir=unwritable()) as env:
        result = env.execute("seq 1000", timeout=15)
        assert result.truncated
        works(env)


def test_a_sandbox_that_ends_with_its_owner_cannot_be_left(quiet_home: Path) -> None:
    with hermitcrab.open("local") as env:
        with pytest.raises(hermitcrab.UnsupportedCapability, match="ends with its owner"):
            env.detach()
        works(env)
