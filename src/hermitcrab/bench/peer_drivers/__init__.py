"""Driving peers with their own Python, through their public API, each at its best.

A driver is a module with `VARIANTS`: ways to use the peer, each a function that opens a `Shell`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Protocol

from hermitcrab.bench.rows import Row, row_to_json
from hermitcrab.bench.stats import scaled, summarize
from hermitcrab.bench.timing import RAW_TRUE, Action, interleaved, raw, swarm

_COMMANDS = 200
_STARTS = 10
_CROWD, _CROWD_COMMANDS, _CROWD_ROUNDS = 32, 20, 3
_BUDGET = 30.0
_REASON_LENGTH = 200


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
    true = _Wanted(who, "execute-true", 'execute("true")', "ms")
    cd = _Wanted(who, "execute-cd", "a `cd` each time", "ms")
    yield true.measured(lambda: _latency(true, lambda: shell.run("true"), scale))
    yield cd.measured(lambda: _cd(cd, shell, scale))
    shell.close()
    start = _Wanted(who, "start", "open an environment", "ms")
    yield start.measured(lambda: _start(start, open_shell, scale))
    callers, commands = scaled(_CROWD, min(1.0, scale * 4)), scaled(_CROWD_COMMANDS, min(1.0, scale * 4))
    crowd = _Wanted(who, "crowd", f"{callers} environments x {commands} commands at once", "commands/s")
    yield crowd.measured(lambda: _crowd(crowd, open_shell, callers, commands, scaled(_CROWD_ROUNDS, scale)))


@dataclass(frozen=True)
class _Wanted:
    """A row before it is measured. What goes wrong meanwhile is the peer's, and what the row then says."""

    who: str
    name: str
    title: str
    unit: str

    def measured(self, measure: Callable[[], Row]) -> Row:
        try:
            return measure()
        except Exception as error:
            return self.row(reason=f"{type(error).__name__}: {error}"[:_REASON_LENGTH])

    def row(self, **found: Any) -> Row:
        return Row(name=self.name, title=self.title, unit=self.unit, who=self.who, **found)


def _latency(wanted: _Wanted, action: Action, scale: float) -> Row:
    samples = interleaved({"ours": action, "raw": raw("true")}, scaled(_COMMANDS, scale), budget=_BUDGET)
    return _times(wanted, samples)


def _cd(wanted: _Wanted, shell: Shell, scale: float) -> Row:
    """Only who remembers it is measured: a `cd` that is forgotten is no `cd`."""
    shell.run("cd /usr")
    if shell.run("pwd").strip() != "/usr":
        return wanted.row(reason="does not remember the directory")
    return _latency(wanted, lambda: shell.run("cd /usr/bin"), scale)


def _start(wanted: _Wanted, open_shell: Open, scale: float) -> Row:
    shells: list[Shell] = []
    samples = interleaved(
        {"ours": lambda: shells.append(open_shell()), "raw": raw("true", "--login")},
        scaled(_STARTS, scale),
        block=2,
        budget=_BUDGET,
    )
    for shell in shells:
        shell.close()
    return _times(wanted, samples)


def _crowd(wanted: _Wanted, open_shell: Open, callers: int, commands: int, rounds: int) -> Row:
    shells = [open_shell() for _ in range(callers)]
    actions = [lambda shell=shell: shell.run("true") for shell in shells]
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    for _ in range(rounds):
        rates["ours"].append(callers * commands / swarm(actions, commands))
        rates["raw"].append(callers * commands / swarm([raw("true")] * callers, commands))
    for shell in shells:
        shell.close()
    return wanted.row(
        ours=summarize(rates["ours"], higher_is_better=True),
        raw=summarize(rates["raw"], higher_is_better=True),
        raw_title=f"{callers} threads that call subprocess.run",
        higher_is_better=True,
    )


def _times(wanted: _Wanted, samples: dict[str, list[float]]) -> Row:
    return wanted.row(
        ours=summarize(samples["ours"], factor=1000),
        raw=summarize(samples["raw"], factor=1000),
        raw_title=RAW_TRUE,
    )
