"""What a provider with a blocking call owes, and what is asked of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from hermitcrab.result import Usage


class CallLost(Exception):
    """What became of one call is not known, or it was refused; the text says which."""


class SandboxGone(Exception):
    """There is no sandbox any more; the text says why."""


class FileRefused(Exception):
    """A file cannot be read or written; the text says why."""


class Program(NamedTuple):
    """What a provider can run that has descriptors as we do: no shell of its own is around it."""

    argv: Sequence[str]
    path: str
    env: Sequence[str]
    given: Mapping[int, bytes]
    """What is in the descriptors that it reads."""
    told: Sequence[int]
    """Descriptors that it writes to, besides its output: what is in them comes with its end."""


@dataclass(frozen=True, eq=False)
class Call:
    """One program to run to its end."""

    command: str
    """For a POSIX shell. Holds no secrets."""
    stdin: bytes
    limit: float | None = None
    """Seconds after which everything that it started is to end."""
    program: Program | None = None
    """In place of the command, which is then for people, and of the stdin."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when everything that it started is to end now."""


class How(Enum):
    """How a call ended."""

    BY_ITSELF = "by itself"
    AT_ITS_LIMIT = "at its limit"
    STOPPED = "stopped"


class Ended(NamedTuple):
    how: How
    returncode: int = 1
    trouble: str = ""
    """What the provider says went wrong; a program that has told its own end knows better."""
    refused: str = ""
    """Why a program was not started."""
    told: Mapping[int, bytes] = {}
    """What a program left in its descriptors."""
    usage: Usage | None = None
    """Of a program, where the provider tells."""
    out_of_memory: bool = False


class Output(Protocol):
    """Takes what a call printed, in order; waits when nobody reads it."""

    async def __call__(self, data: bytes, missing: int = 0) -> None:
        """`missing` bytes before these were not kept by the provider."""


async def nowhere(data: bytes, missing: int = 0) -> None:
    """An `Output` for a call whose words nobody wants."""


class Files(Protocol):
    """A provider's own way to files. Raises FileRefused, CallLost or SandboxGone."""

    def takes(self, path: bytes) -> bool:
        """Whether a file of that name can be asked for in this way."""

    def read(self, path: bytes) -> AsyncIterator[bytes]: ...
    async def write(self, path: bytes, pieces: AsyncIterator[bytes], mode: int, *, parents: bool) -> None:
        """All at once, when the last piece has come."""


class Caller(Protocol):
    """A provider's sandbox."""

    @property
    def takes_bytes(self) -> bool:
        """Whether a stdin may hold any bytes, or only text without NUL."""

    @property
    def runs_bash(self) -> bool:
        """Whether a command is run by bash, or by some other shell."""

    @property
    def waits_for_output(self) -> bool:
        """Whether a call may last until the last process that holds its output is gone."""

    @property
    def takes_programs(self) -> bool: ...

    @property
    def files(self) -> Files | None: ...

    async def run(self, call: Call, output: Output) -> Ended:
        """Make the call, at most once, and wait for its end; CallLost or SandboxGone when that is not known.

        Cancelled, it does nothing more about it.
        """

    async def signal(self, call: Call, number: int) -> None:
        """To all that a program's call started; nothing happens when it is over."""

    async def keep_alive(self) -> None:
        """A sign of life, where there was none for a while."""

    async def end(self) -> None:
        """End the sandbox, and everything in it. Once; never raises, and is bounded in time."""
