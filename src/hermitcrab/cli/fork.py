"""`hermitcrab fork`: independent copies of a named session."""

from __future__ import annotations

import argparse
import itertools

from hermitcrab import sessions
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.named import waiting
from hermitcrab.errors import ConfigError


def main(args: argparse.Namespace) -> int:
    names = args.names or free_names(args.name, args.n)
    if args.names and args.n not in (None, len(args.names)):
        raise ConfigError(f"fork: {args.n} copies and {len(args.names)} names")
    with Interrupts() as interrupts:
        try:
            sessions.fork(args.name, names, args.directory or "", waiting)
        except KeyboardInterrupt:
            return interrupts.exit_code
    print("\n".join(names))
    return 0


def free_names(name: str, n: int | None) -> list[str]:
    """`work-1`, `work-2` ..., as far as they are not taken."""
    if n is not None and n < 1:
        raise ConfigError(f"fork: got {n} copies, takes 1 or more")
    taken = {each.name for each in sessions.every()}
    free = (each for number in itertools.count(1) if (each := f"{name}-{number}") not in taken)
    return list(itertools.islice(free, n or 1))
