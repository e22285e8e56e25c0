"""What the layers owe each other: a backend gives a `Sandbox`, a sandbox gives a `Process`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from hermitcrab.agent.wire import Exit

STDIN, STDOUT, STDERR = 0, 1, 2


class Chunk(NamedTuple):
    """Bytes that a process wrote, and the channel (its descriptor's number) it wrote them to."""

    channel: int
    data: bytes


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a kind of sandbox can honestly do."""

    isolated: bool
    """A command cannot reach the host's files and processes."""
    network: str
    """"host", "own", "off by default" ..., in a word or two for people."""
    persistent: bool = False
    """Its files outlive the sandbox."""
    streams: bool = True
    stdin: bool = True
    kill_reaches_inside: bool = True
    background: bool = True
    terminals: bool = True
    files: bool = True
    creates_cwd: bool = False
    """A start directory that does not exist is made."""
    revives: bool = False
    """A lost one is started again for the next command, with the session's state."""


class Process(Protocol):
    """One running program in a sandbox."""

    def output(self) -> AsyncIterator[Chunk]: ...
    async def write(self, data: bytes) -> None: ...
    async def close_stdin(self) -> None: ...
    async def signal(self, number: int) -> None: ...
    async def kill(self, grace: float) -> None: ...
    async def wait(self) -> Exit: ...


class Sandbox(Protocol):
    """A place where programs can be started."""

    @property
    def id(self) -> str: ...
    async def spawn(
        self, argv: Sequence[str], *, stdin: bool = False, env: Mapping[str, str] | None = None, cwd: str = ""
    ) -> Process: ...
    async def release(self) -> None:
        """End it and everything in it. May be called twice; bounded in time."""


class Sink(Protocol):
    """Where an exec's output and end are delivered, on the event loop's thread."""

    def received(self, channel: int, data: bytes) -> None: ...
    def ended(self, exit_: Exit) -> None: ...
    def lost(self, reason: str) -> None:
        """The sandbox went away before the end was known."""


class Link(Protocol):
    """A byte pipe to an agent."""

    def open(self, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """From now on hand over what arrives, on the loop's thread; `lost` is called once, at the end."""

    def write(self, data: bytes) -> None:
        """From any thread, and it never waits."""

    def close(self) -> None:
        """Say that no more will come; the agent then ends everything and itself."""

    async def ended(self, patience: float, *, keep: bool = False) -> None:
        """Wait until nothing of it is left on this side; past the patience it is made so.

        Unless `keep`, what belonged to the sandbox is removed as well.
        """

    def errors(self) -> str:
        """What was said beside the frames, as far as it was kept."""


class Health(NamedTuple):
    """What `doctor` says of a backend."""

    usable: bool
    detail: str
    hint: str = ""


class Listed(NamedTuple):
    """One of our sandboxes, as `hermitcrab ps` shows it."""

    id: str
    detail: str
    """What it was made from: an image, say."""
    task: str = ""
    owner: str = ""
    """The program that it belongs to, in a word or two for people."""
    orphaned: bool = False
    """That program is gone, and nobody else may use it: `hermitcrab reap` removes it."""
    age: float = 0.0
    """Seconds since its start."""


C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Backend(Generic[C]):
    """One kind of sandbox: its name, its settings, how to start one, whether it can run here."""

    name: str
    summary: str
    config: type[C]
    """A frozen dataclass; its fields are the options of `hermitcrab.open` and of the config file."""
    traits: Traits
    start: Callable[[C], Awaitable[Any]]
    check: Callable[[], Health]
    target: str = ""
    """The setting that `NAME:VALUE` gives, as in `docker:debian`; empty where there is none."""
    inject: Callable[[C], Mapping[str, str]] | None = None
    """Variables that each command is given and that are never kept: asked anew every time, so a quick one."""
    sandboxes: Callable[[], list[Listed]] | None = None
    """Those that outlive a program, or may after a crash, whoever of this user's programs started them."""
    reap: Callable[[], list[Listed]] | None = None
    """Removes those whose owners are gone, and says which."""
