"""`hermitcrab shell`: a prompt where each line is one command of the session."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import cast

import hermitcrab
from hermitcrab.cli import exits, terminal
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.options import confirmation, label, overrides
from hermitcrab.cli.run import same_place, show
from hermitcrab.config_files import APPLICATION
from hermitcrab.environment import Environment
from hermitcrab.errors import CommandRefused

HISTORY_LINES = 1000
CONTINUED = "> "
_PARSE_SECONDS = 5
# What bash says of a text that merely ends too early, whatever its version.
_UNFINISHED = re.compile(
    r"unexpected end of file|unexpected EOF while looking for matching|delimited by end-of-file"
)


def main(args: argparse.Namespace) -> int:
    if args.pty:
        return on_a_terminal(args)
    interactive = sys.stdin.isatty()
    # Bytes that are no text pass through to the command as they are.
    cast(TextIOWrapper, sys.stdin).reconfigure(errors="surrogateescape")
    with Interrupts() as interrupts, history() if interactive else nothing():
        environment = hermitcrab.open(args.on, confirm=confirmation(), **overrides(args))
        try:
            name = label(environment)
            if interactive:
                print(f"hermitcrab: {name}; Ctrl-D or `exit` leaves", file=sys.stderr)
            return converse(environment, name, interrupts, terminal=interactive)
        except KeyboardInterrupt:
            return interrupts.exit_code
        finally:
            interrupts.ignore()
            environment.cleanup()


def on_a_terminal(args: argparse.Namespace) -> int:
    terminal.check_terminal()
    with hermitcrab.open(args.on, confirm=confirmation(), **overrides(args)) as environment:
        print(f"hermitcrab: {label(environment)}; Ctrl-D or `exit` leaves", file=sys.stderr)
        return terminal.converse(environment)


def converse(environment: Environment, name: str, interrupts: Interrupts, *, terminal: bool) -> int:
    """Reads and runs until the end; answers with the last command's status, as a shell does."""
    status = 0

    def prompt() -> str:
        return f"{name}:{environment.cwd}$ "

    for command in commands(prompt, interrupts, terminal=terminal):
        leaving = re.fullmatch(r"\s*exit(?:\s+(\d+))?\s*", command)
        if leaving:
            return int(leaving[1] or status) & 0xFF
        status = run_one(environment, command, interrupts)
        if interrupts.terminated:
            return interrupts.exit_code
    return status


def run_one(environment: Environment, command: str, interrupts: Interrupts) -> int:
    """One line of the session. Ctrl-C ends it, and not the session."""
    try:
        running = environment.stream(command, separate=not same_place(1, 2))
    except ValueError as error:
        print(f"hermitcrab: {error}", file=sys.stderr)
        return 1
    except CommandRefused as error:
        print(f"hermitcrab: {error}", file=sys.stderr)
        return exits.SANDBOX
    interrupts.watch(running.interrupt)
    try:
        return show(running, quiet=False).returncode
    finally:
        interrupts.watch(None)


def commands(prompt: Callable[[], str], interrupts: Interrupts, *, terminal: bool) -> Iterator[str]:
    """Complete commands, each of one or more lines."""
    pending = ""
    while True:
        try:
            line = ask((CONTINUED if pending else prompt()) if terminal else "")
        except EOFError:
            if terminal:
                print(file=sys.stderr)
            if pending:
                yield pending
            return
        except KeyboardInterrupt:
            # At the prompt it throws away what was typed, as in any shell.
            if interrupts.terminated or not terminal:
                raise
            print(file=sys.stderr)
            pending = ""
            continue
        pending += line
        if not pending.strip():
            pending = ""
        elif is_unfinished(pending):
            pending += "\n"
        else:
            yield pending
            pending = ""


def ask(prompt: str) -> str:
    if prompt:
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def is_unfinished(text: str) -> bool:
    """Whether bash waits for more: an open quote, a here-document, `if` without `fi`, a last backslash."""
    if (len(text) - len(text.rstrip("\\"))) % 2:
        return True
    try:
        parsed = subprocess.run(
            ["bash", "-n"],
            input=os.fsencode(text) + b"\n",
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            timeout=_PARSE_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeEncodeError):
        return False
    return bool(_UNFINISHED.search(parsed.stderr.decode(errors="replace")))


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def history() -> Iterator[None]:
    """Line editing, with what was typed before; kept for the user alone and bounded."""
    try:
        import readline  # not in every build of Python
    except ImportError:
        yield
        return
    import platformdirs

    path = Path(platformdirs.user_state_dir(APPLICATION)) / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    except OSError as error:
        print(f"hermitcrab: no history: {error}", file=sys.stderr)
        yield
        return
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        try:
            readline.write_history_file(path)
        except OSError as error:
            print(f"hermitcrab: the history was not saved: {error}", file=sys.stderr)
