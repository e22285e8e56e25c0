"""`hermitcrab run`: one command, its output as it comes, its exit code as ours."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hermitcrab
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.options import confirmation, label, overrides
from hermitcrab.core.protocols import STDERR
from hermitcrab.environment import Environment
from hermitcrab.errors import ConfigError, SandboxError
from hermitcrab.result import Outcome, Result
from hermitcrab.running import RunningCommand

_READ_SIZE = 1 << 16
_WONDER = 1.0


def main(args: argparse.Namespace) -> int:
    command = command_line(args.command)
    with Interrupts() as interrupts:
        environment = None
        try:
            environment = hermitcrab.open(args.on, confirm=confirmation(), **overrides(args))
            if not (args.quiet or args.json):
                print(f"hermitcrab: {label(environment)}", file=sys.stderr)
            result = execute(environment, command, args, interrupts)
        except KeyboardInterrupt:
            return interrupts.exit_code
        finally:
            interrupts.ignore()
            if environment is not None:
                environment.cleanup()
        if args.json:
            print(json.dumps(as_json(result, environment.backend)), flush=True)
        return interrupts.exit_code if interrupts.received else result.returncode


def command_line(words: Sequence[str], verb: str = "run") -> str:
    """One word is a line for the shell; several are a program and its arguments."""
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        raise ConfigError(f"{verb.partition(' ')[0]}: give a command, as in: hermitcrab {verb} 'echo hello'")
    return words[0] if len(words) == 1 else shlex.join(words)


def execute(
    environment: Environment,
    command: str,
    args: argparse.Namespace,
    interrupts: Interrupts,
    **options: Any,
) -> Result:
    piped = is_piped()
    if piped and not environment.traits.stdin:
        piped, options["stdin_data"] = False, whole_stdin()
    separate = args.separate or not (args.json or same_place(1, 2))
    try:
        running = environment.stream(command, separate=separate, stdin=piped, **options)
    except ValueError as error:
        raise ConfigError(f"{args.module.rstrip('_')}: {error}") from None
    interrupts.watch(running.interrupt)
    if piped:
        threading.Thread(target=feed, args=(running, sys.stdin.fileno()), daemon=True).start()
    return show(running, quiet=args.json)


def show(running: RunningCommand, *, quiet: bool) -> Result:
    """Every byte as it came, at once; then, when it did not end by itself, how."""
    out, err = sys.stdout.buffer, sys.stderr.buffer
    for chunk in running.chunks():
        if not quiet:
            stream = err if chunk.channel == STDERR else out
            stream.write(chunk.data)
            stream.flush()
    result = running.wait()
    if result.outcome is not Outcome.COMPLETED and not quiet:
        print(result.output.rstrip("\n").rpartition("\n")[2], file=sys.stderr)
    return result


def feed(running: RunningCommand, descriptor: int) -> None:
    """Our stdin, as it comes. A command that ends without reading it all is no error."""
    try:
        while data := os.read(descriptor, _READ_SIZE):
            running.write(data)
        running.close_stdin()
    except (OSError, SandboxError):
        pass


def whole_stdin() -> bytes:
    """All of it, for a command that cannot be given any later; whoever wonders hears what is waited for."""
    notice = "hermitcrab: waiting for the end of stdin, which goes there whole (</dev/null: none)"
    timer = threading.Timer(_WONDER, print, [notice], {"file": sys.stderr})
    timer.start()
    try:
        return b"".join(iter(lambda: os.read(sys.stdin.fileno(), _READ_SIZE), b""))
    finally:
        timer.cancel()


def is_piped() -> bool:
    """Whether stdin is there and no terminal."""
    try:
        return sys.stdin is not None and not os.isatty(sys.stdin.fileno())
    except (OSError, ValueError):
        return False


def same_place(first: int, second: int) -> bool:
    """Whether two descriptors end in one file, pipe or terminal, where only order keeps them readable."""
    try:
        return os.path.sameopenfile(first, second)
    except OSError:
        return True


def as_json(result: Result, backend: str) -> dict[str, Any]:
    """All of a result, in plain values."""
    plain: dict[str, Any] = {"backend": backend}
    for name in result.__dataclass_fields__:
        value = getattr(result, name)
        if isinstance(value, Outcome):
            value = value.value
        elif isinstance(value, Path):
            value = str(value)
        elif hasattr(value, "__dataclass_fields__"):
            value = {inner: getattr(value, inner) for inner in value.__dataclass_fields__}
        plain[name] = value
    return plain
