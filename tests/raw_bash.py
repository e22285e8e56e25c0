"""Real bash around `hermitcrab.core.script`, without an agent."""

from __future__ import annotations

import os
import subprocess
import tempfile
from typing import NamedTuple

from hermitcrab.core import dump, script
from hermitcrab.core.dump import Parsed
from hermitcrab.core.state import ShellState

_RELAY = 'exec 7<"$0" 8</dev/null 247>"$1" <"$2"; exec bash'


class Told(NamedTuple):
    """What a shell printed, answered and said of itself."""

    status: int
    output: bytes
    dump: bytes


def run(bootstrap: bytes, control: bytes) -> Told:
    """One shell's whole life, with nothing around it."""
    with tempfile.TemporaryDirectory() as directory:
        paths = [os.path.join(directory, name) for name in ("control", "state", "bootstrap")]
        for path, content in zip(paths, (control, b"", bootstrap), strict=True):
            with open(path, "wb") as file:
                file.write(content)
        done = subprocess.run(
            ["bash", "--norc", "-c", _RELAY, *paths],
            env={"PATH": os.environ["PATH"]},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            timeout=60,
        )
        with open(paths[1], "rb") as file:
            return Told(done.returncode, done.stdout, file.read())


def parse(data: bytes, previous: Parsed | None = None) -> Parsed:
    return dump.parse(data, previous, place="test", trusted=True, ignore=frozenset())


def fresh() -> ShellState:
    """What a bare shell is."""
    return parse(run(script.bootstrap(b""), script.message(b":")).dump).state


def execute(
    command: str, state: ShellState, bare: ShellState, previous: Parsed | None = None
) -> tuple[Told, Parsed]:
    """One command in a shell that is restored to `state`, and the state it leaves."""
    restore = script.changes(bare, state)
    assert restore is not None
    preparation = script.prepare(state, bare, directory=state.cwd, injected={}, traps="trap" in command)
    late = len(restore) > 100_000
    bootstrap = script.bootstrap(script.RECEIVE_AND_RESTORE if late else restore)
    control = script.order(b"", preparation, state, command)
    told = run(bootstrap, (script.message(restore) if late else b"") + control)
    return told, parse(told.dump, previous)
