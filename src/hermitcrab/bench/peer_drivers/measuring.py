"""What is measured of a peer, and its rows for this machine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hermitcrab.bench.rows import Row
from hermitcrab.bench.stats import scaled, summarize
from hermitcrab.bench.timing import RAW_TRUE, Action, interleaved, raw, swarm

BUDGET = 30.0
_COMMANDS = 200
_STARTS = 10
CROWD, CROWD_COMMANDS, CROWD_ROUNDS = 32, 20, 3
_REASON_LENGTH = 200


class Shell(Protocol):
    """An environment of a peer."""

    def run(self, command: str) -> str:
        """Its output; an exception when it failed."""
        ...

    def close(self) -> None: ...


Open = Callable[[], Shell]


@dataclass(frozen=True)
class Wanted:
    """A row before it is measured. What goes wrong meanwhile is the peer's, and what the row then says."""

    who: str
    name: str
    title: str
    unit: str = "ms"

    def measured(self, measure: Callable[[], Row]) -> Row:
        try:
            return measure()
        except Exception as error:
            words = f"{type(error).__name__}: {error}".split()
            return self.row(reason=" ".join(words)[:_REASON_LENGTH])

    def row(self, **found: Any) -> Row:
        return Row(name=self.name, title=self.title, unit=self.unit, who=self.who, **found)

    def times(self, samples: Mapping[str, Sequence[float]], raw_title: str) -> Row:
        return self.row(
            ours=summarize(samples["ours"], factor=1000),
            raw=summarize(samples["raw"], factor=1000),
            raw_title=raw_title,
        )

    def rates(self, rates: Mapping[str, Sequence[float]], raw_title: str) -> Row:
        return self.row(
            ours=summarize(rates["ours"], higher_is_better=True),
            raw=summarize(rates["raw"], higher_is_better=True),
            raw_title=raw_title,
            higher_is_better=True,
        )


def local_rows(who: str, open_shell: Open, scale: float) -> Iterator[Row]:
    shell = open_shell()
    true = Wanted(who, "execute-true", 'execute("true")')
    cd = Wanted(who, "execute-cd", "a `cd` each time")
    yield true.measured(lambda: _latency(true, lambda: shell.run("true"), scale))
    yield cd.measured(lambda: _cd(cd, shell, scale))
    shell.close()
    start = Wanted(who, "start", "open an environment")
    yield start.measured(lambda: _start(start, open_shell, scale))
    callers, commands = scaled(CROWD, min(1.0, scale * 4)), scaled(CROWD_COMMANDS, min(1.0, scale * 4))
    crowd = Wanted(who, "crowd", f"{callers} environments x {commands} commands at once", "commands/s")
    yield crowd.measured(lambda: _crowd(crowd, open_shell, callers, commands, scaled(CROWD_ROUNDS, scale)))


def _latency(wanted: Wanted, action: Action, scale: float) -> Row:
    samples = interleaved({"ours": action, "raw": raw("true")}, scaled(_COMMANDS, scale), budget=BUDGET)
    return wanted.times(samples, RAW_TRUE)


def _cd(wanted: Wanted, shell: Shell, scale: float) -> Row:
    """Only who remembers it is measured: a `cd` that is forgotten is no `cd`."""
    shell.run("cd /usr")
    if shell.run("pwd").strip() != "/usr":
        return wanted.row(reason="does not remember the directory")
    return _latency(wanted, lambda: shell.run("cd /usr/bin"), scale)


def _start(wanted: Wanted, open_shell: Open, scale: float) -> Row:
    shells: list[Shell] = []
    samples = interleaved(
        {"ours": lambda: shells.append(open_shell()), "raw": raw("true", "--login")},
        scaled(_STARTS, scale),
        block=2,
        budget=BUDGET,
    )
    for shell in shells:
        shell.close()
    return wanted.times(samples, RAW_TRUE)


def _crowd(wanted: Wanted, open_shell: Open, callers: int, commands: int, rounds: int) -> Row:
    shells = [open_shell() for _ in range(callers)]
    actions = [lambda shell=shell: shell.run("true") for shell in shells]
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    for _ in range(rounds):
        rates["ours"].append(callers * commands / swarm(actions, commands))
        rates["raw"].append(callers * commands / swarm([raw("true")] * callers, commands))
    for shell in shells:
        shell.close()
    return wanted.rates(rates, f"{callers} threads that call subprocess.run")
