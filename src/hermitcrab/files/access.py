"""`env.files`: exact bytes in and out of a sandbox, in constant memory."""

from __future__ import annotations

import os
import secrets
import stat
import warnings
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO

from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.session import Session
from hermitcrab.core.state import path_in
from hermitcrab.errors import HermitcrabWarning, TransferError
from hermitcrab.files.archive import HostTree, rewritten
from hermitcrab.files.entries import FileInfo, Limits, inside, is_inside, weight
from hermitcrab.files.staging import Staging
from hermitcrab.files.streams import PORTION, Reporter, ahead, file_pieces, gathered, in_thread, split
from hermitcrab.files.streams import Report as Report
from hermitcrab.files.tools import NotThere, Tool, listed

Listing = list[FileInfo]
_LONGEST_LIST = 1_000_000


class AsyncFiles:
    """The sandbox's files. A relative path is meant from the session's directory; `~` works."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def read(self, path: str) -> bytes:
        """All of a file."""
        return b"".join([piece async for piece in self.chunks(path)])

    async def read_text(self, path: str, errors: str = "strict") -> str:
        """All of a file, as UTF-8."""
        return (await self.read(path)).decode(errors=errors)

    async def chunks(
        self, path: str, offset: int = 0, most: int | None = None
    ) -> AsyncGenerator[bytes, None]:
        """A file in pieces, from an offset on; a reader that lags makes the sandbox wait."""
        if offset < 0 or (most is not None and most < 0):
            raise ValueError("offset and most are not below 0")
        if most == 0:
            return
        sandbox = await self._session.ready()
        reading = sandbox.read_file(path_in(self._session.state, path), offset, most or 0)
        try:
            async for chunk in reading.output():
                yield chunk.data
            await reading.wait()
        finally:
            if not reading.exec.ended:
                await reading.kill(0)

    async def write(
        self,
        path: str,
        data: bytes | str | AsyncIterable[bytes],
        *,
        mode: int | None = None,
        parents: bool = True,
    ) -> None:
        """Replace a file, all at once: nobody ever sees half of it, and after a failure it is as it was.

        Text is written as UTF-8. `parents` makes the directories on the way. Without a `mode` a file that
        is there keeps its own.
        """
        if mode is not None and not 0 < mode <= 0o7777:
            raise ValueError(f"a mode is above 0 and at most 0o7777, not {mode!r}")
        sandbox = await self._session.ready()
        writing = sandbox.write_file(path_in(self._session.state, path), mode=mode or 0, parents=parents)
        try:
            async for piece in split(data, PORTION):
                await writing.write(piece)
            await writing.close_stdin()
            await writing.wait()
        except BaseException:
            await writing.kill(0)
            raise

    async def list(self, path: str = "") -> Listing:
        """What is in a directory, by name; links are not followed."""
        found: Listing = []
        room = _LONGEST_LIST
        async with aclosing(self._records("list", f"list {path or '.'}", [path])) as records:
            async for batch in records:
                found += map(inside, batch)
                room -= sum(weight(info.path, info.target) for info in batch)
                if room < 0:
                    raise TransferError(f"{path} has more than {_LONGEST_LIST} entries; use walk")
        return sorted(found)

    async def walk(self, path: str = "") -> AsyncGenerator[FileInfo, None]:
        """All that is in a directory and in those below it, in no order; links are not followed, and
        what is in a `closed` directory is not told."""
        async with aclosing(self._batches(path)) as batches:
            async for batch in batches:
                for info in batch:
                    yield info

    async def _batches(self, path: str) -> AsyncGenerator[Sequence[FileInfo], None]:
        """The same as it comes, for whoever waits on another thread: once for many."""
        async with aclosing(self._records("walk", f"list {path or '.'}", [path])) as records:
            async for batch in records:
                yield [inside(info) for info in batch]

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        """What is known of a file. `follow` asks about what a link leads to instead of the link."""
        async with aclosing(self._records("stat", f"stat {path}", [str(int(follow)), path])) as records:
            async for batch in records:
                for info in batch:
                    return info._replace(path=path)
        raise TransferError(f"the sandbox says nothing about {path}")

    async def exists(self, path: str) -> bool:
        """Whether there is anything at that path; a link to nowhere is nothing."""
        try:
            await self.stat(path)
        except NotThere:
            return False
        return True

    async def mkdir(self, path: str, *, mode: int | None = None, parents: bool = True) -> None:
        """Make a directory. With `parents` those on the way are made too, and one that is there is fine."""
        if mode is not None and not 0 <= mode <= 0o7777:
            raise ValueError(f"a mode is at least 0 and at most 0o7777, not {mode!r}")
        octal = "" if mode is None else f"{mode:o}"
        await self._run("mkdir", f"make the directory {path}", [octal, str(int(parents)), path])

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False) -> None:
        """Remove a file, a link or an empty directory; with `recursive` a directory and all that is in it."""
        if not path or not path_in(self._session.state, path).strip("/"):
            raise ValueError("remove takes the path of a file, and not the root directory")
        flags = [str(int(recursive)), str(int(missing_ok))]
        await self._run("remove", f"remove {path}", [*flags, path])

    async def remove_many(self, path: str, names: Iterable[str]) -> None:
        """Remove these, relative to a directory, each with all that is in it. Missing ones are fine."""
        await self._run("remove-many", f"remove files in {path}", [path], listed(_checked(names)))

    async def upload(
        self,
        source: str | os.PathLike[str],
        path: str,
        *,
        mode: int | None = None,
        parents: bool = True,
        progress: Report | None = None,
    ) -> None:
        """Copy a file or a tree of the host into the sandbox, with its permissions.

        A file replaces the one at `path`; `mode` and `parents` are as for `write`. What is in a directory
        goes into the directory `path`, among what may be there. Each file takes its place when all of it has
        arrived.
        """
        source = Path(source)
        if await in_thread(source.is_dir):
            if mode is not None:
                raise ValueError(f"mode is for a file, and {source} is a directory")
            await self._upload_tree(source, path, Reporter(progress))
            return
        try:
            file = await in_thread(_readable_file, source)
        except OSError as error:
            raise TransferError(f"cannot read {source}: {error.strerror}") from error
        with file:
            status = os.fstat(file.fileno())
            own = status.st_mode & 0o777
            pieces = Reporter(progress, status.st_size).counted(file_pieces(file.fileno()))
            # To the agent 0 says nothing of the mode; what nobody may read must not become readable to all.
            await self.write(path, ahead(pieces), mode=mode or own or 0o600, parents=parents)

    async def _upload_tree(self, source: Path, path: str, reporter: Reporter) -> None:
        tree = HostTree(source)

        async def pieces() -> AsyncGenerator[bytes, None]:
            made = tree.pieces()
            while piece := await in_thread(next, made, b""):
                yield piece
                reporter.reached(tree.bytes, tree.files)

        await self._run("unpack", f"upload {source} to {path}", ["0", path], pieces())
        if tree.left_out:
            warnings.warn(f"{tree.left_out} is no file, directory or link: left out", HermitcrabWarning, 2)
        reporter.done(tree.bytes, tree.files)

    async def download(
        self,
        path: str,
        target: str | os.PathLike[str],
        *,
        progress: Report | None = None,
        limits: Limits = Limits(),  # noqa: B008 - frozen
    ) -> None:
        """Copy a file or a tree of the sandbox to the host, with its permissions.

        A file replaces the target. What is in a directory goes into the directory `target`, among what may be
        there. Until all of it has arrived, and is within the limits, the host stays as it was.
        """
        target = Path(target)
        info = await self.stat(path)
        if info.kind == "directory":
            await self._download_tree(path, target, Reporter(progress), limits)
        else:
            await self._download_file(path, info, target, Reporter(progress, info.size), limits)

    async def _download_file(
        self, path: str, info: FileInfo, target: Path, reporter: Reporter, limits: Limits
    ) -> None:
        if await in_thread(target.is_dir):
            raise TransferError(f"{target} is a directory; a file cannot take its place")
        too_much = TransferError(f"{path} has more than {limits.bytes} bytes (Limits.bytes)")
        if info.size > limits.bytes:
            raise too_much
        part = target.with_name(f".hermitcrab-{secrets.token_hex(8)}")
        taken = 0
        try:
            with await in_thread(_private_file, part) as file:
                async with aclosing(reporter.counted(gathered(self.chunks(path)))) as pieces:
                    async for piece in pieces:
                        taken += len(piece)
                        if taken > limits.bytes:
                            raise too_much
                        await in_thread(file.write, piece)
                os.fchmod(file.fileno(), info.mode & 0o777)
            part.replace(target)
        except OSError as error:
            raise TransferError(f"cannot write {target}: {error.strerror}") from error
        finally:
            with suppress(OSError):  # in its place, or it could not be made
                part.unlink()

    async def _download_tree(self, path: str, target: Path, reporter: Reporter, limits: Limits) -> None:
        staging = Staging(target, limits)
        counted = staging.inspector
        try:
            await in_thread(staging.begin)
            async with aclosing(gathered(self.pack(path))) as pieces:
                async for piece in pieces:
                    await in_thread(staging.feed, piece)
                    reporter.reached(counted.bytes, counted.files)
            await in_thread(staging.commit)
        finally:
            await in_thread(staging.discard)
        reporter.done(counted.bytes, counted.files)

    async def pack(
        self, path: str, names: Iterable[str] | None = None, exclude: Sequence[str] = ()
    ) -> AsyncGenerator[bytes, None]:
        """A directory of the sandbox as a tar archive, in pieces; what they hold is the sandbox's word.

        With `names`, relative to it, exactly those, a directory without what is in it; what is missing or may
        not be read is left out. `exclude` has relative paths that are left out with all below them.
        Sockets, pipes and devices always are.
        """
        stdin = None if names is None else listed(_checked(names))
        arguments = [str(int(names is not None)), path, *_checked(exclude)]
        tool, sandbox = await self._tool("pack", f"pack {path}", arguments)
        async with aclosing(tool.output(sandbox, stdin)) as pieces:
            async for piece in pieces:
                yield piece

    async def unpack(self, path: str, chunks: AsyncIterable[bytes], *, owners: bool = False) -> None:
        """A tar archive into a directory of the sandbox, which is made if need be.

        Each file takes its place when all of it has arrived; a failure leaves those before it. `owners` gives
        each the numbers of its owner and group, where the sandbox's user may.
        """
        await self._run("unpack", f"unpack into {path}", [str(int(owners)), path], rewritten(chunks))

    async def _tool(self, verb: str, purpose: str, arguments: Sequence[str]) -> tuple[Tool, AgentSandbox]:
        """Its path is the last of the arguments that it always has."""
        at = _PATH_AT[verb]
        located = path_in(self._session.state, arguments[at])
        sandbox = await self._session.ready()
        return Tool(purpose, verb, [*arguments[:at], located, *arguments[at + 1 :]]), sandbox

    async def _run(
        self, verb: str, purpose: str, arguments: Sequence[str], stdin: AsyncIterable[bytes] | None = None
    ) -> None:
        tool, sandbox = await self._tool(verb, purpose, arguments)
        await tool.run(sandbox, stdin)

    async def _records(
        self, verb: str, purpose: str, arguments: Sequence[str]
    ) -> AsyncGenerator[Sequence[FileInfo], None]:
        tool, sandbox = await self._tool(verb, purpose, arguments)
        async with aclosing(tool.records(sandbox)) as records:
            async for batch in records:
                yield batch


_PATH_AT = {
    "stat": 1,
    "list": 0,
    "walk": 0,
    "mkdir": 2,
    "remove": 2,
    "remove-many": 0,
    "pack": 1,
    "unpack": 1,
}
"""Which argument of a tool is the path."""


def _readable_file(path: Path) -> BinaryIO:
    """Not a pipe, which might keep us waiting for ever, nor a device without an end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb", buffering=0)
    os.close(descriptor)
    raise TransferError(f"cannot read {path}: Not a regular file")


def _private_file(path: Path) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _checked(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        if not is_inside(name) or "\0" in name:
            raise ValueError(f"not a path within the directory: {name!r}")
        yield name
