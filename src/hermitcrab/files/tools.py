"""The programs that work on files in a sandbox: the agent's own where it has them, else bash and tar.

They run as processes of the agent's, so that streams, flow control and kills are as for any other, and
nothing that takes long keeps the agent from its work.

| tool | arguments | stdin | stdout |
| --- | --- | --- | --- |
| stat | follow, path | | one record |
| list, walk | path | | records |
| mkdir | octal mode or empty, parents, path | | |
| remove | recursive, missing_ok, path | | |
| remove-many | path | names | |
| pack | named, path, left out ... | names | tar |
| unpack | owners, path | tar | |

Names end with a NUL. Status 3 says that there is nothing at that path, 1 anything else; stderr says what.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import aclosing, suppress

from hermitcrab.agent.wire import Cause, Exit, Feature
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.process import AgentProcess
from hermitcrab.core.protocols import STDERR
from hermitcrab.core.quoting import encode
from hermitcrab.errors import HermitcrabWarning, SandboxStartError, TransferError
from hermitcrab.files import shell
from hermitcrab.files.entries import FileInfo, Records
from hermitcrab.files.streams import PORTION, ahead, split

_OWN_PROGRAM = "/proc/self/exe"
_NOT_THERE = 3
_SAID = 4096
# Enough to take back what is half done.
_GRACE = 2.0
_BATCH = 1 << 16


class NotThere(TransferError):
    """There is nothing at that path."""


def has_tools(sandbox: AgentSandbox) -> bool:
    """Whether its agent has them; else the sandbox's own programs serve."""
    return sandbox.hello is not None and bool(sandbox.hello.features & Feature.TOOLS)


class Tool:
    """One of the tools, with its arguments."""

    def __init__(self, purpose: str, verb: str, arguments: Sequence[str]) -> None:
        """`purpose` follows "cannot" in the message of a failure."""
        self.purpose, self.verb, self.arguments = purpose, verb, arguments

    async def run(self, sandbox: AgentSandbox, stdin: AsyncIterable[bytes] | None = None) -> None:
        """To its end; for one that prints nothing."""
        async with aclosing(self.output(sandbox, stdin)) as pieces:
            async for _ in pieces:
                pass

    async def records(self, sandbox: AgentSandbox) -> AsyncGenerator[Sequence[FileInfo], None]:
        """What one that prints records has found, as it comes."""
        records = Records()
        async with aclosing(self.output(sandbox)) as pieces:
            async for piece in pieces:
                yield records.feed(piece)
        records.end()

    async def output(
        self, sandbox: AgentSandbox, stdin: AsyncIterable[bytes] | None = None
    ) -> AsyncGenerator[bytes, None]:
        """What it prints, while it is given its input. It does not outlive the iteration."""
        process = await self._start(sandbox, stdin is not None)
        feeding = None if stdin is None else asyncio.create_task(_feed(process, stdin))
        said = b""
        try:
            async for channel, data in process.output():
                if channel == STDERR:
                    said = (said + data)[:_SAID]
                else:
                    yield data
            if feeding is not None and feeding.done():
                feeding.result()
            exit_ = await self._ended(process, sandbox)
        finally:
            await _leave(process, feeding)
        if exit_.cause is not Cause.ENDED or exit_.code:
            raise self._failure(exit_, _readable(said), sandbox)
        if said:
            warnings.warn(f"{self.purpose}: {_readable(said)}", HermitcrabWarning, stacklevel=2)

    async def _start(self, sandbox: AgentSandbox, stdin: bool) -> AgentProcess:
        if has_tools(sandbox):
            words = ["hermitcrab-files", "--files", self.verb, *self.arguments]
            return await sandbox.spawn(words, program=_OWN_PROGRAM, stdin=stdin, env={})
        return await sandbox.spawn(shell.argv(self.verb, self.arguments), stdin=stdin)

    async def _ended(self, process: AgentProcess, sandbox: AgentSandbox) -> Exit:
        try:
            return await process.wait()
        except SandboxStartError as error:
            raise TransferError(f"cannot {self.purpose}: {error}", backend=sandbox.backend) from error

    def _failure(self, exit_: Exit, said: str, sandbox: AgentSandbox) -> TransferError:
        kind = NotThere if exit_.code == _NOT_THERE else TransferError
        how = f"status {exit_.code}" if exit_.cause is Cause.ENDED else "it was killed"
        return kind(f"cannot {self.purpose}: {said or how}", backend=sandbox.backend)


async def _feed(process: AgentProcess, pieces: AsyncIterable[bytes]) -> None:
    try:
        async with aclosing(split(ahead(pieces), PORTION)) as portions:
            async for piece in portions:
                await process.write(piece)
                if process.exec.ended:
                    return  # it says itself why it took no more
        await process.close_stdin()
    except BaseException:
        # Whoever waits for its output hears of it, and then of our failure.
        await process.kill(_GRACE)
        raise


async def _leave(process: AgentProcess, feeding: asyncio.Task[None] | None) -> None:
    """Nothing of it goes on."""
    if not process.exec.ended:
        await process.kill(_GRACE)
        async for _ in process.output():
            pass  # what waits to be read holds its end back
    if feeding is not None:
        feeding.cancel()
        await asyncio.wait([feeding])
        if not feeding.cancelled():
            feeding.exception()  # told already, or overtaken by what is being told
    with suppress(Exception):  # as above
        await process.wait()


def _readable(said: bytes) -> str:
    """A sandbox's own words, on one line and without what a terminal would obey."""
    text = " ".join(said.decode(errors="replace").split())
    return "".join(each if each.isprintable() else "?" for each in text)


async def listed(names: Iterable[str]) -> AsyncGenerator[bytes, None]:
    """Names as the tools read them."""
    batch = bytearray()
    for name in names:
        batch += encode(name) + b"\0"
        if len(batch) > _BATCH:
            yield bytes(batch)
            batch.clear()
    yield bytes(batch)
