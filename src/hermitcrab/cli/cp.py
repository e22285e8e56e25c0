"""`hermitcrab cp`: files and trees between this machine and named sessions, in every direction."""

from __future__ import annotations

import argparse
import posixpath
import re
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from hermitcrab import moving, sessions
from hermitcrab.cli.interrupts import Interrupts
from hermitcrab.cli.meter import Meter
from hermitcrab.cli.named import waiting
from hermitcrab.core import loop
from hermitcrab.environment import Environment
from hermitcrab.errors import ConfigError, TransferError
from hermitcrab.files.entries import Limits
from hermitcrab.moving import Plan


class Side(NamedTuple):
    """One end of a copy."""

    session: str
    """Empty: this machine."""
    path: str


def main(args: argparse.Namespace) -> int:
    source, target = side(args.source), side(args.target)
    if not source.session and not target.session:
        raise ConfigError("cp: one of the two is NAME:PATH, with the name of a session")
    with Interrupts() as interrupts:
        try:
            with ExitStack() as stack, Meter() as meter:
                # In one order for everybody, so that no two of us wait for each other.
                used = {
                    name: stack.enter_context(sessions.use(name, waiting))
                    for name in sorted({source.session, target.session} - {""})
                }
                limits = Limits(outward_links=True) if args.outward_links else None
                copy(source, target, used, Plan(limits=limits, progress=meter.show))
        except KeyboardInterrupt:
            return interrupts.exit_code
    return 0


def side(text: str) -> Side:
    """`NAME:PATH`, or a path of this machine; `./a:b` is one too."""
    named = re.fullmatch(r"([^/:]+):(.*)", text, re.DOTALL)
    return Side(named[1], named[2]) if named else Side("", text)


def copy(source: Side, target: Side, used: dict[str, Environment], plan: Plan) -> None:
    inside = target.path.endswith("/") or is_directory(target, used)
    path = posixpath.join(target.path, basename(source.path)) if inside else target.path
    if not source.session:
        used[target.session].files.upload(source.path, path, progress=plan.progress)
    elif not target.session:
        limits = plan.limits or Limits()
        used[source.session].files.download(source.path, path, progress=plan.progress, limits=limits)
    else:
        between(used[source.session], source.path, used[target.session], path, plan)


def basename(path: str) -> str:
    """The name that a copy has in a directory; none for `dir/.`, whose content goes there."""
    name = posixpath.basename(path.rstrip("/"))
    return "" if name in ("", ".", "..", "~") else name


def is_directory(each: Side, used: dict[str, Environment]) -> bool:
    if not each.session:
        return Path(each.path).is_dir()
    files = used[each.session].files
    return not each.path or (files.exists(each.path) and files.stat(each.path).kind == "directory")


def between(old: Environment, source: str, new: Environment, target: str, plan: Plan) -> None:
    info = old.files.stat(source)
    if info.kind == "directory":
        loop.run(moving.shipped(old._async, source, new._async, target, plan))
    elif info.kind == "file":
        loop.run(new._async.files.write(target, old._async.files.chunks(source), mode=info.mode or None))
    else:
        raise TransferError(f"{source} is neither a file nor a directory")
