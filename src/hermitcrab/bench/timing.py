"""Taking the time, fairly. Needs nothing but the standard library: peers' own Pythons import it too."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence

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
    while len(ends) < len(actions):
        time.sleep(_SAMPLE_EVERY)
        observe()
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
