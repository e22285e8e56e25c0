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
    guarded: bool = False
    """A machine that people use: the guard is on there by itself, as it is on the host."""
    carries: str = "nothing"
    """How credentials, skills and caches get in: "mounts", "copies", "same files" or "nothing"."""
    workspace: str = ""
    """The directory of a sandbox's own for the user's files; empty where it has none, as on a host."""


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


class Carried(NamedTuple):
    """A host path that is seen inside a sandbox and cannot be changed there."""

    source: str
    target: str
    """Absolute, or `~/...` in the HOME that commands have."""


@dataclass(frozen=True, kw_only=True)
class Luggage:
    """What a session's settings bring to the start of its sandbox, beside the backend's own."""

    mounts: Sequence[Carried] = ()
    """Empty unless the backend's traits say that it mounts."""
    inherited: Callable[[], Mapping[str, str]] = dict
    """The host's variables without its secrets, for a sandbox that is the host itself."""
    cwd: str = ""
    """Where the session is to start, as it was given; for a sandbox that wants to know when it is made."""


class Tree(NamedTuple):
    """Files of a sandbox that a snapshot keeps in an archive."""

    path: str
    """A directory in the sandbox."""
    exclude: tuple[str, ...] = ()
    """Paths in it that are not the sandbox's own: what is mounted there from the host."""
    names: tuple[str, ...] | None = None
    """These paths in it and nothing else; None: all."""
    removed: tuple[str, ...] = ()
    """Paths in it that a fresh sandbox has, and that this one has no more."""
    kept: bool = False
    """It is on the host and outlives the sandbox anyway."""
    home: bool = False
    """It is where credentials, skills and caches are mounted, which are no part of a snapshot."""


class Snapshots(Protocol):
    """How the sandboxes of a kind are kept. Configs are instances of the backend's own."""

    def task(self, config: Any) -> str:
        """The task that goes on in the next sandbox; empty when this config asks for nothing of the kind."""

    def reference(self, id: str) -> str:
        """What `save` will call what it keeps, to find it after a crash; empty where nobody can know."""

    async def save(self, sandbox: Any, config: Any, id: str) -> str:
        """Keep what the sandbox's engine can keep by itself; what to ask for it by, or nothing."""

    async def trees(self, sandbox: Any, config: Any) -> Sequence[Tree]:
        """The directories that the native part does not hold."""

    async def layer(self, sandbox: Any, config: Any) -> Tree | None:
        """What else differs from a fresh sandbox and is in no native part."""

    def applied(self, config: Any, native: str) -> Any:
        """The config of a sandbox that begins with that native part."""

    def available(self, native: str) -> bool:
        """Whether it is still there. Waits; call it from a thread, as `remove`."""

    def remove(self, native: str) -> bool:
        """Whether there was anything to remove. SandboxError when it cannot be removed now."""


NO_LUGGAGE = Luggage()
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class Backend(Generic[C]):
    """One kind of sandbox: its name, its settings, how to start one, whether it can run here."""

    name: str
    summary: str
    config: type[C]
    """A frozen dataclass; its fields are the options of `hermitcrab.open` and of the config file."""
    traits: Traits
    start: Callable[[C, Luggage], Awaitable[Any]]
    check: Callable[[], Health]
    target: str = ""
    """The setting that `NAME:VALUE` gives, as in `docker:debian`; empty where there is none."""
    needs: str = ""
    """The variable or login that it finds its credentials by, for people; empty where it needs none."""
    exposes: Callable[[C], bool] | None = None
    """Whether commands can write to files of the host with these settings; the guard is on then, too."""
    sandboxes: Callable[[], list[Listed]] | None = None
    """Those that outlive a program, or may after a crash, whoever of this user's programs started them."""
    reap: Callable[[], list[Listed]] | None = None
    """Removes those whose owners are gone, and says which."""
    rejoin: Callable[[C], Awaitable[Any]] | None = None
    """The sandbox of the config's task as it is, whatever it was made with; None when there is none."""
    set_network: Callable[[Any, bool], Awaitable[None]] | None = None
    """Gives a sandbox that runs its network, or takes it away."""
    end_task: Callable[[str], bool] | None = None
    """Removes the sandbox of a task that outlives its programs. Whether there was one."""
    lasting: Callable[[C], bool] | None = None
    """Whether a sandbox with these settings stays after `cleanup`, so that of its files no copy is kept."""
    snapshots: Snapshots | None = None
    """None where a sandbox is not ours to copy."""
