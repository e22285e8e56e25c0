"""`hermitcrab exec`: one command of a named session, which goes on from the one before."""

from __future__ import annotations

import argparse
import json
import sys
import time

from hermitcrab import sessions
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.named import waiting
from hermitcrab.cli.run import as_json, command_line, execute
from hermitcrab.environment import Environment

_LAST_BREATH = 0.05
"""Seconds in which what a command started ends with it."""


def main(args: argparse.Namespace) -> int:
    command = command_line(args.command, f"exec {args.name}")
    with Interrupts() as interrupts:
        try:
            with sessions.use(args.name, waiting) as environment:
                if any(each.running for each in environment.resumed()):
                    print(
                        "hermitcrab: a command of a program that was killed still runs there", file=sys.stderr
                    )
                result = execute(
                    environment, command, args, interrupts, cwd=args.cwd or "", timeout=args.timeout
                )
                # From here to the end of the session's use the state is written, in little time.
                interrupts.ignore()
                if leaves_behind(environment):
                    print(
                        f"hermitcrab: what this command left running ends with it; {environment.backend} "
                        "keeps nothing running between two commands",
                        file=sys.stderr,
                    )
        except KeyboardInterrupt:
            return interrupts.exit_code
    if args.json:
        print(json.dumps(as_json(result, environment.backend)), flush=True)
    return interrupts.exit_code if interrupts.received else result.returncode


def leaves_behind(environment: Environment) -> bool:
    """Whether processes are left that will not be there for the next command."""
    sandbox = environment._session.sandbox
    if sandbox.detached or not sandbox.lingering:
        return False
    time.sleep(_LAST_BREATH)
    return sandbox.lingering
