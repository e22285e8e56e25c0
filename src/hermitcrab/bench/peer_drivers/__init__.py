"""Driving peers with their own Python, through their public API, each at its best.

A driver is a module with `VARIANTS`: ways to use the peer, each a function that opens a `Shell`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from typing import Any, Protocol

from hermitcrab.bench.rows import Row, row_to_json
from hermitcrab.bench.stats import scaled, summarize
from hermitcrab.bench.timing import RAW_TRUE, Action, interleaved, raw, swarm

_COMMANDS = 200
_STARTS = 10
_CROWD, _CROWD_COMMANDS, _CROWD_ROUNDS = 32, 20, 3
_BUDGET = 30.0


class Shell(Protocol):
    """An environment of a peer."""

    def run(self, command: str) -> str:
        """Its output; an exception when it failed."""
        ...

    def close(self) -> None: ...


Open = Callable[[], Shell]


def measure(peer: str, scale: float) -> list[dict[str, Any]]:
    driver = import_module(f"{__name__}.{peer.replace('-', '_')}")
    version = metadata.version(peer)
    variants: dict[str, Open] = driver.VARIANTS
    return [
        row_to_json(row)
        for variant, open_shell in variants.items()
        for row in _rows(" ".join(filter(None, (peer, version, variant))), open_shell, scale)
    ]


def _rows(who: str, open_shell: Open, scale: float) -> Iterator[Row]:
    shell = open_shell()
    try:
        yield _latency(who, "execute-true", 'execute("true")', lambda: shell.run("true"), scale)
        yield _cd(who, shell, scale)
    finally:
        shell.close()
    yield _start(who, open_shell, scale)
    yield _crowd(who, open_shell, scale)


def _latency(who: str, name: str, title: str, action: Action, scale: float) -> Row:
    samples = interleaved({"ours": action, "raw": raw("true")}, scaled(_COMMANDS, scale), budget=_BUDGET)
    return _row(who, name, title, samples)


def _cd(who: str, shell: Shell, scale: float) -> Row:
    """Only who remembers it is measured: a `cd` that is forgotten is no `cd`."""
    name, title = "execute-cd", "a `cd` each time"
    shell.run("cd /usr")
    if shell.run("pwd").strip() != "/usr":
        return Row(name=name, title=title, unit="ms", who=who, reason="does not remember the directory")
    return _latency(who, name, title, lambda: shell.run("cd /usr/bin"), scale)


def _start(who: str, open_shell: Open, scale: float) -> Row:
    shells: list[Shell] = []
    samples = interleaved(
        {"ours": lambda: shells.append(open_shell()), "raw": raw("true", "--login")},
        scaled(_STARTS, scale),
        block=2,
        budget=_BUDGET,
    )
    for shell in shells:
        shell.close()
    return _row(who, "start", "open an environment", samples)


def _crowd(who: str, open_shell: Open, scale: float) -> Row:
    callers, commands = scaled(_CROWD, min(1.0, scale * 4)), scaled(_CROWD_COMMANDS, min(1.0, scale * 4))
    shells = [open_shell() for _ in range(callers)]
    actions = [lambda shell=shell: shell.run("true") for shell in shells]
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    for _ in range(scaled(_CROWD_ROUNDS, scale)):
        rates["ours"].append(callers * commands / swarm(actions, commands))
        rates["raw"].append(callers * commands / swarm([raw("true")] * callers, commands))
    for shell in shells:
        shell.close()
    return Row(
        name="crowd",
        title=f"{callers} environments x {commands} commands at once",
        unit="commands/s",
        who=who,
        ours=summarize(rates["ours"], higher_is_better=True),
        raw=summarize(rates["raw"], higher_is_better=True),
        raw_title=f"{callers} threads that call subprocess.run",
        higher_is_better=True,
    )


def _row(who: str, name: str, title: str, samples: dict[str, list[float]]) -> Row:
    return Row(
        name=name,
        title=title,
        unit="ms",
        who=who,
        ours=summarize(samples["ours"], factor=1000),
        raw=summarize(samples["raw"], factor=1000),
        raw_title=RAW_TRUE,
    )
