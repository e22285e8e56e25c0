"""The gateway: what it adds to a command, how many it carries, what a sandbox from it takes."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import hermitcrab
from hermitcrab.bench import process
from hermitcrab.bench.beside import Rows, given, row_of, unless_missing
from hermitcrab.bench.http_caller import Caller, Gateway, serving
from hermitcrab.bench.places import used_once
from hermitcrab.bench.rows import Row, at_least, below, row_to_json
from hermitcrab.bench.stats import percentile, scaled, summarize
from hermitcrab.bench.timing import SETTLE, Action, Life, all_open, interleaved, lives, swarm

_COMMANDS = 400
_CLIENTS, _EACH, _ROUNDS = 64, 20, 5
_STARTS = 20
_POOL = 4
_REFILL = 1.0
"""Seconds between two creations: a pool is for those who come now and then."""
_RECORDS = 2000
_AT_ONCE = 8
_HELD = 100
_ADDED_MS, _RATE, _WARM_MS = 3.0, 1000.0, 15.0
Open = Callable[[], hermitcrab.Environment]


def local(scale: float) -> Rows:
    return unless_missing(_titles("local", scale), lambda: _engine("local", scale, {}, ("--engine", "local")))


def docker(scale: float, image: str | None) -> Rows:
    def measure() -> Rows:
        found = given(image, "--image IMAGE")
        return _engine("docker", scale / 4, {"image": found}, ("--engine", f"docker:{found}"))

    return unless_missing(_titles("docker", scale / 4), measure)


def _titles(engine: str, scale: float) -> dict[str, str]:
    clients, each = _crowd(scale)
    return {
        f"gateway-{engine}-exec": f"gateway on {engine}: one command",
        f"gateway-{engine}-execute": f'gateway on {engine}: GatewayEnvironment.execute("true")',
        f"gateway-{engine}-crowd": f"gateway on {engine}: {clients} clients x {each} commands at once",
        f"gateway-{engine}-create": f"gateway on {engine}: create, first command",
        f"gateway-{engine}-warm": f"gateway on {engine}: create from the warm pool",
    }


def _crowd(scale: float) -> tuple[int, int]:
    return scaled(_CLIENTS, min(1.0, scale * 4)), scaled(_EACH, min(1.0, scale * 4))


def _engine(engine: str, scale: float, options: Mapping[str, Any], served: tuple[str, ...]) -> Rows:
    def direct() -> hermitcrab.Environment:
        return hermitcrab.open(engine, **options)

    titles = _titles(engine, scale)
    with tempfile.TemporaryDirectory() as state, serving(state, *served) as gateway:
        rows = [
            *_commands(engine, titles, gateway, direct, scale),
            _crowded(engine, titles, gateway, direct, scale),
            _created(engine, titles, gateway, direct, scale),
        ]
    pool = ("--pool", str(_POOL))
    with tempfile.TemporaryDirectory() as state, serving(state, *served, *pool) as gateway:
        return [*rows, _warm(engine, titles, gateway, direct, scale)]


def _true(env: hermitcrab.Environment) -> None:
    env.execute("true").check()


def _commands(engine: str, titles: Mapping[str, str], gateway: Gateway, direct: Open, scale: float) -> Rows:
    """Over HTTP, through our client, and without a gateway: the same sandbox's kind, in turns."""
    with ExitStack() as stack:
        raw = stack.enter_context(direct())
        ours = stack.enter_context(hermitcrab.GatewayEnvironment(gateway.url))
        caller = Caller(gateway).create()
        stack.callback(caller.close)
        seconds = interleaved(
            {
                "http": caller.execute,
                "client": partial(_true, ours),
                "raw": partial(_true, raw),
            },
            scaled(_COMMANDS, scale),
        )
    added = (percentile(seconds["http"], 50) - percentile(seconds["raw"], 50)) * 1000
    title = f'execute("true") on {engine} without a gateway'
    return [
        row_of(
            f"gateway-{engine}-{name}",
            titles,
            {"ours": seconds[of], "raw": seconds["raw"]},
            title,
            *([below(added, _ADDED_MS, "ms added")] if of == "http" else []),
        )
        for name, of in (("exec", "http"), ("execute", "client"))
    ]


def _crowded(
    engine: str, titles: Mapping[str, str], gateway: Gateway, direct: Open, scale: float
) -> dict[str, Any]:
    clients, each = _crowd(scale)
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    with (
        all_open(lambda: Caller(gateway).create(), Caller.close, clients, at_once=_AT_ONCE) as callers,
        all_open(direct, hermitcrab.Environment.cleanup, clients, at_once=_AT_ONCE) as environments,
    ):
        contenders: dict[str, list[Action]] = {
            "ours": [caller.execute for caller in callers],
            "raw": [partial(_true, env) for env in environments],
        }
        for actions in contenders.values():
            swarm(actions, 1)
        for _ in range(scaled(_ROUNDS, scale)):
            for name, actions in contenders.items():
                time.sleep(SETTLE * 10)
                rates[name].append(clients * each / swarm(actions, each))
    found = {name: summarize(taken, higher_is_better=True) for name, taken in rates.items()}
    goals = (at_least(found["ours"].median, _RATE, "commands/s"),) if engine == "local" else ()
    name = f"gateway-{engine}-crowd"
    return row_to_json(
        Row(
            name=name,
            title=titles[name],
            unit="commands/s",
            ours=found["ours"],
            raw=found["raw"],
            raw_title=f"as many environments on {engine} without a gateway, one thread each",
            higher_is_better=True,
            goals=goals,
        )
    )


def _created(
    engine: str, titles: Mapping[str, str], gateway: Gateway, direct: Open, scale: float
) -> dict[str, Any]:
    def begin() -> Caller:
        caller = Caller(gateway).create()
        caller.execute()
        return caller

    begins, _ = lives(
        {
            "ours": Life(begin, Caller.close),
            "raw": Life(lambda: used_once(direct()), hermitcrab.Environment.cleanup),
        },
        scaled(_STARTS, scale),
    )
    return row_of(f"gateway-{engine}-create", titles, begins, f"open and execute on {engine}")


def _warm(
    engine: str, titles: Mapping[str, str], gateway: Gateway, direct: Open, scale: float
) -> dict[str, Any]:
    begins, _ = lives(
        {
            "ours": Life(lambda: Caller(gateway).create(), Caller.close),
            "raw": Life(direct, hermitcrab.Environment.cleanup),
        },
        scaled(_STARTS, scale),
        rest=_REFILL,
    )
    warm = percentile(begins["ours"], 50) * 1000
    goal = below(warm, _WARM_MS, "ms")
    return row_of(f"gateway-{engine}-warm", titles, begins, f"open on {engine}", goal)


def records(scale: float) -> Rows:
    """Many open sandboxes: what the gateway's own process keeps of each, and whether use makes it grow."""
    count = scaled(_RECORDS, scale)
    titles = {"gateway-records": f"gateway: {count} open sandboxes, its memory for each"}
    return unless_missing(titles, lambda: [_records(count, titles)], "KiB")


def _records(count: int, titles: Mapping[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as state, serving(state, "--engine", "local") as gateway:
        pid = gateway.process.pid
        caller = Caller(gateway)
        caller.create().execute()
        empty = process.resident_kib(pid)
        sandboxes = [caller.create().sandbox for _ in range(count)]
        opened = process.resident_kib(pid)
        after = []
        for _ in range(3):
            for caller.sandbox in sandboxes:
                caller.execute()
            after.append(process.resident_kib(pid))
    each = max(0, opened - empty) / count
    steady = (after[-1] - after[0]) / 1024
    return row_to_json(
        Row(
            name="gateway-records",
            title=titles["gateway-records"],
            unit="KiB",
            ours=summarize([each]),
            raw=summarize([_held_directly(min(count, _HELD))]),
            raw_title="an environment on local in a program that holds it itself",
            goals=(below(steady, 8, "MiB of growth over two more commands in each"),),
            details={
                "with one sandbox (MiB)": empty / 1024,
                "with all of them (MiB)": opened / 1024,
                "after one command in each (MiB)": after[0] / 1024,
                "after three (MiB)": after[-1] / 1024,
            },
        )
    )


def _held_directly(count: int) -> float:
    """KiB of this process for each environment."""
    hermitcrab.open("local").cleanup()
    before = process.resident_kib()
    with all_open(lambda: hermitcrab.open("local"), hermitcrab.Environment.cleanup, count):
        return max(0, process.resident_kib() - before) / count
