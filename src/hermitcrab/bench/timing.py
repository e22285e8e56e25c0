"""Taking the time, fairly. Needs nothing but the standard library: peers' own Pythons import it too."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Action = Callable[[], object]

BLOCK = 20
"""Calls in a row before it is the other's turn: short, so that noise hits all; long enough to be steady."""
SETTLE = 0.03
"""Seconds of rest before a turn, so that nobody pays for what another one left to be done."""
BUDGET = 60.0
_WARM_UP = 3
_SAMPLE_EVERY = 0.02


def interleaved(
    contenders: Mapping[str, Action],
    count: int,
    *,
    block: int = BLOCK,
    think: float = 0.0,
    budget: float = BUDGET,
) -> dict[str, list[float]]:
    """Seconds of each call, `count` for each contender, in alternating blocks.

    Blocks, and not call by call: a contender that works ahead for its next command (as we do) would do so in
    the other's time. `think` seconds pass before each call and are not counted. Past the budget it stops.
    """
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for action in contenders.values():
        for _ in range(min(_WARM_UP, count)):
            action()
    give_up = time.monotonic() + budget
    while len(samples[names[0]]) < count and (not samples[names[0]] or time.monotonic() < give_up):
        size = min(block, count - len(samples[names[0]]))
        for name in names:
            time.sleep(SETTLE)
            samples[name] += _block(contenders[name], size, think)
        names.append(names.pop(0))  # whoever began is last in the next round
    return samples


def _block(action: Action, size: int, think: float) -> list[float]:
    seconds = []
    for _ in range(size):
        if think:
            time.sleep(think)
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return seconds


@dataclass(frozen=True)
class Life:
    """Something that is begun and ended: how, each."""

    begin: Callable[[], Any]
    end: Callable[[Any], object] = lambda _: None


def lives(
    contenders: Mapping[str, Life], count: int, *, budget: float = BUDGET, rest: float = 0.3
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each beginning, and of each end: one life after the other, in turns, so that none pile up.

    The first life of each is not counted. After each there is a rest, for what is still done then.
    """
    names = list(contenders)
    begins: dict[str, list[float]] = {name: [] for name in names}
    ends: dict[str, list[float]] = {name: [] for name in names}
    give_up = time.monotonic() + budget
    for turn in range(count + 1):
        if turn > 1 and time.monotonic() > give_up:
            break
        for name in names:
            life = contenders[name]
            start = time.perf_counter()
            alive = life.begin()
            begun = time.perf_counter()
            life.end(alive)
            ended = time.perf_counter()
            if turn > 0:
                begins[name].append(begun - start)
                ends[name].append(ended - begun)
            time.sleep(rest)
        names.append(names.pop(0))
    return begins, ends


@contextmanager
def all_open(
    open_one: Callable[[], Any], close: Callable[[Any], object], count: int, *, at_once: int = 1
) -> Iterator[list[Any]]:
    """So many of them, opened and closed a few at once; those that opened are closed whatever happens."""
    opened: list[Any] = []
    with ThreadPoolExecutor(at_once) as pool:
        try:
            list(pool.map(lambda _: opened.append(open_one()), range(count)))
            yield opened
        finally:
            list(pool.map(close, opened))


def swarm(actions: Sequence[Action], repeat: int, observe: Action = lambda: None) -> float:
    """Seconds until each action, in a thread of its own, was done `repeat` times.

    `observe` is called now and then meanwhile, and once at the end while all threads are still there.
    """
    start_line = threading.Barrier(len(actions) + 1)
    leave = threading.Event()
    ends: list[float] = []
    errors: list[BaseException] = []

    def work(action: Action) -> None:
        start_line.wait()
        try:
            for _ in range(repeat):
                action()
        except BaseException as error:
            errors.append(error)
        ends.append(time.perf_counter())
        leave.wait()

    threads = [threading.Thread(target=work, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    start_line.wait()
    start = time.perf_counter()
    try:
        while len(ends) < len(actions):
            time.sleep(_SAMPLE_EVERY)
            observe()
    finally:
        leave.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return max(ends) - start


def raw(command: str, *options: str) -> Action:
    """The lower bound: a bash for one command, started by the standard library."""
    argv = ["bash", *options, "-c", command]
    return lambda: subprocess.run(argv, check=True)


RAW_TRUE = 'subprocess.run(["bash", "-c", "true"])'
