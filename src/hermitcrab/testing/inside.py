"""Looking into a sandbox through its own commands, and at this machine from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from hermitcrab.core.state import Variable
from hermitcrab.environment import Environment
from hermitcrab.result import Result
from hermitcrab.running import RunningCommand
from hermitcrab.testing.suite import Inapplicable

E = TypeVar("E", bound=BaseException)

PATIENCE = float(os.environ.get("HERMITCRAB_TESTING_PATIENCE") or 15)
"""Seconds after which something that should happen at once is taken not to happen: more on slow machines."""
MARKS = ("__hc", "state1", "nocd", "builtin", "190473829")
"""What only our own text around a command says."""


def say(env: Environment, command: str, cwd: str = "", **options: Any) -> str:
    """What a command that must succeed prints, without its last line break."""
    result = env.execute(command, cwd, timeout=PATIENCE, **options)
    assert result.returncode == 0, result
    return result.output.removesuffix("\n")


def works(env: Environment) -> None:
    """The session answers as if nothing had happened."""
    result = env.execute("echo still here", timeout=PATIENCE)
    assert (result.output, result.returncode) == ("still here\n", 0), result


def value(env: Environment, name: str) -> Any:
    """A variable as the session remembers it; None when it does not."""
    return env.state.variables.get(name, Variable(None)).value


def attributes(env: Environment, name: str) -> set[str]:
    return set(env.state.variables[name].attributes)


def scratch(env: Environment) -> str:
    """A new directory in the sandbox, where the session now is."""
    return say(env, 'cd "$(mktemp -d)" && pwd -P')


def needs(env: Environment, *programs: str) -> None:
    """Leave the case when the sandbox lacks a program that its question is asked with."""
    for program in programs:
        if env.execute(f"type -P {program}").returncode != 0:
            raise Inapplicable(f"there is no {program} in this sandbox")


def needs_proc(env: Environment) -> None:
    if env.execute("test -r /proc/self/stat").returncode != 0:
        raise Inapplicable("there is no /proc in this sandbox")


def alive(env: Environment, *pids: int) -> list[int]:
    """Those of the processes that still run, as the sandbox sees it."""
    numbers = " ".join(map(str, pids))
    listed = say(
        env,
        f"for p in {numbers}; do kill -0 $p 2>/dev/null || continue; "
        'test ! -r /proc/$p/stat || { s=$(</proc/$p/stat); s=${s##*) }; test "${s%% *}" != Z; } && echo $p; '
        "done; unset p s; true",
    )
    return [int(word) for word in listed.split()]


def pids_in(output: str) -> list[int]:
    """The numbers that a command printed on lines of their own."""
    return [int(line) for line in output.splitlines() if line.strip().isdigit()]


def read_until(running: RunningCommand, text: str) -> str:
    """The output of a command up to and including some text; waits for it."""
    seen = ""
    for piece in running:
        seen += piece
        if text in seen:
            return seen
    raise AssertionError(f"it ended without printing {text!r}; it printed {seen!r}")


@contextmanager
def meanwhile(env: Environment, command: str, **options: Any) -> Iterator[Future[Result]]:
    """A command that runs in another thread while the block does."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(env.execute, command, **{"timeout": PATIENCE, **options})


def raised(kind: type[E] | tuple[type[E], ...], action: Callable[[], object]) -> E:
    """The exception of that kind that an action must raise."""
    try:
        outcome = action()
    except kind as error:
        return error
    raise AssertionError(f"it was not refused but gave {outcome!r}")


def soon(condition: Callable[[], bool]) -> None:
    """It becomes true within the patience."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not become true"
        time.sleep(0.01)


def reveals_nothing(output: str) -> None:
    """Nothing in an output is ours."""
    for mark in MARKS:
        assert mark not in output, f"{mark!r} is in the output: {_around(output, mark)}"


def _around(text: str, mark: str) -> str:
    at = text.index(mark)
    return repr(text[max(0, at - 100) : at + 100])


def host_processes() -> dict[int, str]:
    """Every process of this machine and its arguments; empty where there is no /proc."""
    found: dict[int, str] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            found[int(entry.name)] = (
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue  # it ended meanwhile
    return found


def own_children() -> set[int]:
    """The child processes of this very program, dead ones that nobody waited for included."""
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = entry.read_text(errors="replace").rpartition(")")[2].split()[1]
        except OSError:
            continue
        if int(parent) == os.getpid():
            found.add(int(entry.parent.name))
    return found


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))
