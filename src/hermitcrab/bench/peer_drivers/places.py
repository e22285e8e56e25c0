"""A peer's rows for containers and hosts, each beside what people do there without anybody's help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing

from hermitcrab.bench.peer_drivers.measuring import BUDGET, CROWD, CROWD_ROUNDS, Open, Shell, Wanted
from hermitcrab.bench.raw_places import Container, RawPlace, SharedConnection, log_in_once
from hermitcrab.bench.rows import Row
from hermitcrab.bench.stats import scaled
from hermitcrab.bench.timing import Life, all_open, interleaved, lives, swarm

_COMMANDS = 60
_STARTS = 8
_CROWD_COMMANDS = 5
_AT_ONCE = 8
_COMMAND = 'execute("true")'


def docker_rows(who: str, open_shell: Open, image: str, scale: float) -> Iterator[Row]:
    def raw_container() -> Container:
        return Container("docker", image)

    def begin_raw() -> Container:
        container = raw_container()
        container.true()
        return container

    true = Wanted(who, "docker-true", f"docker: {_COMMAND}")
    yield true.measured(lambda: _true(true, open_shell, raw_container, "docker exec NAME true", scale))
    start = Wanted(who, "docker-start", f"docker: open, first {_COMMAND}")
    beside = Life(begin_raw, Container.close)
    yield start.measured(
        lambda: _start(start, open_shell, beside, "docker run -d, docker exec NAME true", scale)
    )
    callers = scaled(CROWD, min(1.0, scale * 4))
    title = f"docker: {callers} containers x {_CROWD_COMMANDS} commands at once"
    crowd = Wanted(who, "docker-crowd", title, "commands/s")
    yield crowd.measured(lambda: _crowd(crowd, open_shell, raw_container, callers, scale))


def ssh_rows(who: str, open_shell: Open, host: str, config: str | None, scale: float) -> Iterator[Row]:
    true = Wanted(who, "ssh-true", f"ssh: {_COMMAND}")
    over_master = "ssh HOST true over a ControlMaster"
    yield true.measured(
        lambda: _true(true, open_shell, lambda: SharedConnection(host, config), over_master, scale)
    )
    start = Wanted(who, "ssh-start", f"ssh: open, first {_COMMAND}")
    beside = Life(lambda: log_in_once(host, config))
    yield start.measured(
        lambda: _start(start, open_shell, beside, "ssh HOST true over a connection of its own", scale)
    )


def _true(
    wanted: Wanted, open_shell: Open, open_raw: Callable[[], RawPlace], raw_title: str, scale: float
) -> Row:
    with closing(open_shell()) as shell, closing(open_raw()) as place:
        samples = interleaved(
            {"ours": lambda: shell.run("true"), "raw": place.true}, scaled(_COMMANDS, scale), budget=BUDGET
        )
    return wanted.times(samples, raw_title)


def _start(wanted: Wanted, open_shell: Open, beside: Life, raw_title: str, scale: float) -> Row:
    def begin() -> Shell:
        shell = open_shell()
        shell.run("true")
        return shell

    ours = Life(begin, lambda shell: shell.close())
    begins, _ = lives({"ours": ours, "raw": beside}, scaled(_STARTS, scale), budget=BUDGET)
    return wanted.times(begins, raw_title)


def _crowd(
    wanted: Wanted, open_shell: Open, raw_container: Callable[[], Container], callers: int, scale: float
) -> Row:
    """Peers are opened one by one: not all of them can be otherwise. Only commands are counted."""
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    with (
        all_open(open_shell, lambda shell: shell.close(), callers) as shells,
        all_open(raw_container, Container.close, callers, at_once=_AT_ONCE) as containers,
    ):
        ours = [lambda shell=shell: shell.run("true") for shell in shells]
        raw = [container.true for container in containers]
        for _ in range(scaled(CROWD_ROUNDS, scale, at_least=1)):
            rates["ours"].append(callers * _CROWD_COMMANDS / swarm(ours, _CROWD_COMMANDS))
            rates["raw"].append(callers * _CROWD_COMMANDS / swarm(raw, _CROWD_COMMANDS))
    return wanted.rates(rates, f"docker exec from {callers} threads, each into a container of its own")
