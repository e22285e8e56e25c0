"""Moving house: a session and its files carried into another sandbox.

The files stream through this machine in constant memory, and what a sandbox sends is read as hostile. The old
place is left as it was until the new one has been proven.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import warnings
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hermitcrab.async_environment import AsyncEnvironment
from hermitcrab.config import Resolved, resolve
from hermitcrab.core.state import ShellState, path_in
from hermitcrab.errors import ConfigError, HermitcrabWarning, SandboxError, TransferError
from hermitcrab.files import tar
from hermitcrab.files.archive import TRUSTING, Inspector
from hermitcrab.files.entries import Limits, decode
from hermitcrab.files.streams import Report, Reporter
from hermitcrab.opening import opened
from hermitcrab.result import Outcome

_NEVER = ("/", "/dev", "/proc", "/sys")
_SYSTEM = ("/bin", "/boot", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/sbin", "/usr", "/var", "/run")
_CROWDED = ("/home", "/media", "/mnt", "/opt", "/root", "/srv", "/tmp", "/var/tmp")
"""No system directories, but not a project's either: what is below them may be."""


@dataclass(frozen=True)
class Plan:
    """How to move: the arguments of `move_to` that are not about the new sandbox."""

    directory: str = ""
    exclude: Sequence[str] = ()
    keep_code: bool = False
    keep_old: bool = False
    limits: Limits | None = None
    progress: Report | None = None


class Target(NamedTuple):
    """Where the files go in the new place."""

    path: str
    made: bool
    """It is ours to remove when the move fails."""


async def move(old: AsyncEnvironment, on: str, options: Mapping[str, Any], plan: Plan) -> AsyncEnvironment:
    """The session on another sandbox. After a failure the old one is as it was, and nothing else is left."""
    resolved = resolve(on, options, cwd=Path.cwd(), environ=os.environ)
    return await move_into(old, replace(resolved, confirm=old._resolved.confirm), plan)


async def move_into(old: AsyncEnvironment, resolved: Resolved, plan: Plan) -> AsyncEnvironment:
    """The same with settings that are known already."""
    source = await source_directory(old, plan.directory)
    new = await carried(old, source, resolved, plan)
    if not plan.keep_old:
        try:
            await old.cleanup()
        except SandboxError as error:
            # The session lives on in the new place; that the old one did not end well must not end it too.
            _warn(f"the old {old.backend} sandbox did not end well: {error}")
    return new


async def carried(old: AsyncEnvironment, source: str, resolved: Resolved, plan: Plan) -> AsyncEnvironment:
    state = old.state
    # The directory is entered when it is there, which may be after the files have arrived.
    entered_later = replace(resolved, session=replace(resolved.session, cwd=""))
    new = await opened(entered_later, state, keep_code=plan.keep_code)
    target = None
    try:
        target = await _prepared(new, resolved.session.cwd)
        await carry(old, source, new, target.path, plan)
        await settle(new, state, source, target.path)
    except BaseException:
        await _undo(new, target)
        raise
    return new


async def source_directory(env: AsyncEnvironment, given: str) -> str:
    """What is carried: the directory that was given, else the workspace, else where the session is."""
    directory = given or env.workspace or env.cwd
    if not given:
        refuse(directory, env.state)
        if not within(env.cwd, directory):
            _warn(
                f"the files of {directory} are carried; those of {env.cwd}, where the session is, "
                f"stay behind (directory={env.cwd!r} takes them instead)"
            )
    path = await physical(env, path_in(env.state, directory))
    if path in _NEVER:
        raise ConfigError(f"directory: {path} cannot be carried; name one inside it")
    return path


def refuse(directory: str, state: ShellState) -> None:
    """An error for what nobody means to carry without having said so."""
    home = state.environ.get("HOME", "")
    what = ""
    if directory in (*_NEVER, *_CROWDED) or any(within(directory, each) for each in _SYSTEM):
        what = "a directory of the system"
    elif home and within(home, directory):
        what = "a home directory"
    if what:
        raise ConfigError(
            f"directory: the session is in {directory}, {what}, which is not carried unless you say so; "
            "`cd` to the project first, or give directory=..."
        )


def within(path: str, directory: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")


def rerooted(path: str | None, old: str, new: str) -> str | None:
    """The same place in the new tree; None when it was not in the old one."""
    if path is None or not within(path, old):
        return None
    return (new.rstrip("/") + path[len(old.rstrip("/")) :]) or "/"


def fresh_directory(environ: Mapping[str, str], kind: str) -> str:
    """A directory for files in a place that has none of its own, by that place's environment."""
    data = environ.get("XDG_DATA_HOME") or f"{environ.get('HOME', '').rstrip('/')}/.local/share"
    return f"{data}/hermitcrab/{kind}/{secrets.token_hex(4)}"


async def physical(env: AsyncEnvironment, path: str) -> str:
    """A directory's path without links, as the session itself would name it."""
    running = env._session.begin(r"\builtin pwd -P; \builtin printf .", path, background=True)
    running.close_stdin()
    said = b"".join([chunk.data async for chunk in running.chunks()])
    result = await running.wait()
    if result.outcome is Outcome.NOT_RUN or not said.startswith(b"/"):
        raise ConfigError(f"directory: cannot enter {path} in the {env.backend} sandbox")
    return decode(said).removesuffix("\n.")


async def _prepared(new: AsyncEnvironment, cwd: str) -> Target:
    """An empty directory for the files: the one that was asked for, the place's own, else a fresh one."""
    wanted = cwd or new.workspace or fresh_directory(new.state.environ, "workspaces")
    path = path_in(new.state, wanted)
    made = not await new.files.exists(path)
    if made:
        await new.files.mkdir(path, mode=0o700)
    path = await physical(new, path)
    if not made and await new.files.list(path):
        raise ConfigError(
            f"{path} in the new {new.backend} sandbox is not empty, and nothing is ever mixed; "
            "give another cwd=..., or empty it",
            backend=new.backend,
        )
    return Target(path, made)


async def carry(old: AsyncEnvironment, source: str, new: AsyncEnvironment, target: str, plan: Plan) -> None:
    """The files of one directory into an empty one; what is there then is what was sent."""
    sent, arrived = await shipped(old, source, new, target, plan), Tally()
    async for info in new.files.walk(target):
        mode = 0 if info.kind == "link" else info.mode
        arrived = arrived.plus(info.path, info.kind, info.size, mode, info.target)
    if arrived != sent:
        raise TransferError(
            f"{sent.entries} files with {sent.bytes} bytes were sent to {new.backend}, and {arrived.entries} "
            f"with {arrived.bytes} are there, not all as they were",
            backend=new.backend,
        )


async def shipped(
    old: AsyncEnvironment, source: str, new: AsyncEnvironment, target: str, plan: Plan
) -> Tally:
    """The files of one directory among those of another, wherever the two are."""
    shipment = Shipment(plan.limits or usual_limits(old, new), Reporter(plan.progress))
    # Credentials and the like are the host's own: the new sandbox has them if its settings say so.
    private = [each.path.removeprefix(f"{source}/") for each in old.carried() if within(each.path, source)]
    async with (
        aclosing(old.files.pack(source, exclude=[*plan.exclude, *private])) as pieces,
        aclosing(shipment.passing(pieces)) as passing,
    ):
        await new.files.unpack(target, passing)
    return shipment.tally


def usual_limits(old: AsyncEnvironment, new: AsyncEnvironment) -> Limits:
    """A sandbox may do to another what it likes; what it sends to a host is looked at."""
    return Limits() if old.traits.isolated and not new.traits.isolated else TRUSTING


class Tally(NamedTuple):
    """A tree in a few numbers, whatever the order it is told in."""

    entries: int = 0
    bytes: int = 0
    digest: int = 0

    def plus(self, path: str, kind: str, size: int, mode: int, target: str) -> Tally:
        size = size if kind == "file" else 0
        known = repr((path, kind, size, mode, target)).encode()
        number = int.from_bytes(hashlib.blake2b(known, digest_size=16).digest())
        return Tally(self.entries + 1, self.bytes + size, (self.digest + number) % (1 << 128))


class Shipment:
    """An archive on its way, looked at and counted as it passes."""

    def __init__(self, limits: Limits, reporter: Reporter) -> None:
        self.tally = Tally()
        self._inspector = Inspector(limits)
        self._reporter = reporter

    async def passing(self, pieces: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
        reader = tar.Reader()
        async for piece in pieces:
            for part in reader.feed(piece):
                if isinstance(part, tar.Entry):
                    self._inspector.admit(part)
                    self._count(part)
            yield piece
            self._reporter.reached(self.tally.bytes, self.tally.entries)
        self._reporter.done(self.tally.bytes, self.tally.entries)

    def _count(self, entry: tar.Entry) -> None:
        if entry.path != b".":
            mode = 0 if entry.kind == "link" else entry.mode
            self.tally = self.tally.plus(
                decode(entry.path), entry.kind, entry.size, mode, decode(entry.target)
            )


async def settle(new: AsyncEnvironment, state: ShellState, source: str, target: str) -> None:
    """Put the session where it was, in the new tree, and see that it works there."""
    new.workspace = target
    new._session.relocate(
        rerooted(state.cwd, source, target) or target, rerooted(state.oldpwd, source, target)
    )
    result = await new.execute("")
    if result.outcome is not Outcome.COMPLETED:
        raise SandboxError(
            f"the session does not work in the new place: {result.output}", backend=new.backend
        )


async def _undo(new: AsyncEnvironment, target: Target | None) -> None:
    """Nothing is left of it, but for what was there before us."""
    with suppress(SandboxError):
        if target is not None:
            await _emptied(new, target)
        if new._session.sandbox.joined:
            await new.detach()
            return
    await end([new])


async def _emptied(new: AsyncEnvironment, target: Target) -> None:
    """For places whose files outlive the sandbox."""
    if target.made:
        await new.files.remove(target.path, recursive=True, missing_ok=True)
    else:
        await new.files.remove_many(target.path, [each.path for each in await new.files.list(target.path)])


async def end(environments: Iterable[AsyncEnvironment]) -> None:
    """Without a word: nobody has come to hold them."""
    for each in environments:
        each._keeper = None
        with suppress(SandboxError):
            await each.cleanup()


def _warn(message: str) -> None:
    warnings.warn(message, HermitcrabWarning, stacklevel=4)
