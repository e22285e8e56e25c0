"""How long one command takes, beside a bash that is started for it alone."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hermitcrab
from hermitcrab.bench.rows import Row, at_most, row_to_json
from hermitcrab.bench.stats import ratio, scaled, summarize
from hermitcrab.bench.timing import RAW_TRUE, Action, interleaved, raw
from hermitcrab.bench.worker import PACKAGE_HOME, empty_home

COMMANDS = 400
_THINKING = 0.005
_FUNCTIONS = 300
_FUNCTION_LINES = 6
_STARTS = 40
_MILLISECONDS = 1000.0


def execute_true(scale: float) -> list[dict[str, Any]]:
    with hermitcrab.open("local") as env:
        samples = interleaved(
            {"ours": lambda: env.execute("true").check(), "raw": raw("true")}, scaled(COMMANDS, scale)
        )
    reached = ratio(summarize(samples["ours"]), summarize(samples["raw"]))
    return _row("execute-true", 'execute("true")', samples, goals=(at_most(reached, 1.25),))


def execute_cd(scale: float) -> list[dict[str, Any]]:
    commands = itertools.cycle(["cd /usr", "cd /usr/bin", "cd /"])
    return _each("execute-cd", "a `cd` each time", lambda: next(commands), scale)


def execute_export(scale: float) -> list[dict[str, Any]]:
    numbers = itertools.count()
    return _each("execute-export", "an `export` each time", lambda: f"export BENCH={next(numbers)}", scale)


def execute_functions(scale: float) -> list[dict[str, Any]]:
    """100 KB of functions in the session; beside it what a bash takes that reads them anew each time."""
    text = functions()
    with tempfile.TemporaryDirectory() as directory, hermitcrab.open("local") as env:
        file = Path(directory, "functions.sh")
        file.write_text(text)
        env.execute(f". {file}").check()
        samples = interleaved(
            {
                "ours": lambda: env.execute("true").check(),
                "raw": raw("true"),
                "reading": raw(f". {file}; true"),
            },
            scaled(COMMANDS // 2, scale),
        )
    reading = summarize(samples["reading"], factor=_MILLISECONDS)
    details = {
        "functions (KiB)": len(text) / 1024,
        "raw bash that reads the same functions (ms)": reading.median,
    }
    title = 'execute("true") with 100 KB of functions'
    return _row("execute-functions", title, samples, details=details)


def execute_thinking(scale: float) -> list[dict[str, Any]]:
    """As an agent works: a pause before each command, on both sides, that is not counted."""
    with hermitcrab.open("local") as env:
        samples = interleaved(
            {"ours": lambda: env.execute("true").check(), "raw": raw("true")},
            scaled(COMMANDS // 2, scale),
            think=_THINKING,
        )
    return _row("execute-thinking", 'execute("true") after 5 ms of thinking', samples)


def start(scale: float) -> list[dict[str, Any]]:
    """Opening and cleaning up; a bash that reads the login profile is what opening cannot do without."""
    return lifecycle("local", "", raw("true", "--login"), "bash --login -c true", scale)


def bubblewrap(scale: float) -> list[dict[str, Any]]:
    """The same in a sandbox, beside a bash without one and the smallest sandbox around a bash."""
    try:
        env = hermitcrab.open("bubblewrap")
    except hermitcrab.SandboxError as error:
        return [_absent("bubblewrap-true", str(error)), _absent("bubblewrap-start", str(error))]
    smallest = ["bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--dev", "/dev"]
    smallest += ["--proc", "/proc", "--setenv", "HOME", "/nowhere", "bash", "--login", "-c", "true"]
    with env:
        samples = interleaved(
            {"ours": lambda: env.execute("true").check(), "raw": raw("true")}, scaled(COMMANDS, scale)
        )
    return [
        *_row("bubblewrap-true", 'bubblewrap: execute("true")', samples),
        *lifecycle(
            "bubblewrap",
            "bubblewrap-",
            lambda: subprocess.run(smallest, check=True),
            "bwrap ... bash --login -c true",
            scale,
        ),
    ]


def command_line(scale: float) -> list[dict[str, Any]]:
    """What a shell user with an empty profile waits for, beside a Python that does nothing."""

    def python(*arguments: str) -> Action:
        argv, path = [sys.executable, *arguments], {"PYTHONPATH": str(PACKAGE_HOME)}
        return lambda: subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, env={**os.environ, **path})

    count = scaled(_STARTS, scale)
    nothing, block = python("-c", "pass"), 4
    imported = interleaved({"ours": python("-c", "import hermitcrab"), "raw": nothing}, count, block=block)
    run = ("-m", "hermitcrab.cli", "run", "--quiet", "--on", "local", "true")
    with empty_home():
        ran = interleaved({"ours": python(*run), "raw": nothing}, count, block=block)
    return [
        *_row("import", "import hermitcrab", imported, raw_title="python -c pass"),
        *_row("run-true", "hermitcrab run true", ran, raw_title="python -c pass"),
    ]


def lifecycle(
    backend: str, prefix: str, beside: Action, beside_title: str, scale: float
) -> list[dict[str, Any]]:
    opened: list[hermitcrab.Environment] = []
    count = scaled(_STARTS, scale)
    starts = interleaved(
        {"ours": lambda: opened.append(hermitcrab.open(backend)), "raw": beside}, count, block=4
    )
    bashes = [subprocess.Popen(["bash"], stdin=subprocess.PIPE) for _ in opened]

    def end_bash() -> None:
        with bashes.pop() as bash:
            bash.kill()

    # What the warm-up of this one takes away is not counted.
    cleanups = interleaved({"ours": lambda: opened.pop().cleanup(), "raw": end_bash}, count - 1, block=4)
    while opened:
        opened.pop().cleanup()
    while bashes:
        end_bash()
    where = f"{backend}: " if prefix else ""
    return [
        *_row(f"{prefix}start", f"{where}open an environment", starts, raw_title=beside_title),
        *_row(f"{prefix}cleanup", f"{where}clean it up", cleanups, raw_title="kill a bash and wait for it"),
    ]


def functions() -> str:
    body = "".join(
        f'    local part{line}="${{1:-nothing}} and ${{2:-more}}"\n' for line in range(_FUNCTION_LINES)
    )
    return "".join(
        f"bench_function_{number} () {{\n{body}    echo $part1\n}}\n" for number in range(_FUNCTIONS)
    )


def _each(name: str, title: str, next_command: Callable[[], str], scale: float) -> list[dict[str, Any]]:
    with hermitcrab.open("local") as env:
        samples = interleaved(
            {
                "ours": lambda: env.execute(next_command()).check(),
                "raw": lambda: subprocess.run(["bash", "-c", next_command()], check=True),
            },
            scaled(COMMANDS, scale),
        )
    return _row(name, title, samples, raw_title='subprocess.run(["bash", "-c", ...]) of the same')


def _row(
    name: str, title: str, samples: dict[str, list[float]], *, raw_title: str = RAW_TRUE, **more: Any
) -> list[dict[str, Any]]:
    row = Row(
        name=name,
        title=title,
        unit="ms",
        ours=summarize(samples["ours"], factor=_MILLISECONDS),
        raw=summarize(samples["raw"], factor=_MILLISECONDS),
        raw_title=raw_title,
        **more,
    )
    return [row_to_json(row)]


def _absent(name: str, reason: str) -> dict[str, Any]:
    return row_to_json(Row(name=name, title=name.replace("-", ": ", 1), unit="ms", reason=reason))
