"""`hermitcrab shell --pty`: this terminal becomes one in the sandbox."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hermitcrab.cli.run import feed
from hermitcrab.environment import Environment
from hermitcrab.errors import ConfigError
from hermitcrab.running import RunningCommand

_ENDING = (signal.SIGTERM, signal.SIGHUP)


def converse(environment: Environment) -> int:
    """An interactive bash on a terminal of the sandbox's own, as large as ours; returns its status."""
    term = shlex.quote(os.environ.get("TERM") or "dumb")
    running = environment.stream(f"TERM={term} bash -i", terminal=size())
    with raw_mode(sys.stdin.fileno()), followed(running):
        threading.Thread(target=feed, args=(running, sys.stdin.fileno()), daemon=True).start()
        for chunk in running.chunks():
            os.write(sys.stdout.fileno(), chunk.data)
    return running.wait().returncode


def check_terminal() -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "shell --pty needs a terminal on stdin and stdout; leave out --pty to pipe commands"
        )


def size() -> tuple[int, int]:
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return rows or 24, columns or 80  # a terminal may not know its size


@contextmanager
def raw_mode(descriptor: int) -> Iterator[None]:
    """Every key goes to the sandbox, Ctrl-C too."""
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor, termios.TCSADRAIN)  # what was typed ahead is kept
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def followed(running: RunningCommand) -> Iterator[None]:
    """While entered, the far terminal has our size, and what ends us ends it."""

    def resized(number: int, frame: FrameType | None) -> None:
        # In a thread: the main thread may hold, right now, a lock that this needs.
        threading.Thread(target=running.resize, args=size(), daemon=True).start()

    def ended(number: int, frame: FrameType | None) -> None:
        threading.Thread(target=running.kill, daemon=True).start()

    handlers = {signal.SIGWINCH: resized, **dict.fromkeys(_ENDING, ended)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
