"""What a provider's module owes, so that everything else is written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from hermitcrab.backends.clouds.retry import Failure
from hermitcrab.core.protocols import Health


class Terms(Protocol):
    """The settings that every provider's config has."""

    @property
    def task_id(self) -> str: ...
    @property
    def max_lifetime(self) -> float:
        """Seconds that a sandbox goes on at the provider without a sign of life from here."""

    @property
    def start_timeout(self) -> float:
        """Seconds for a sandbox to come up."""


class Running(Protocol):
    """A program in a sandbox. Its methods raise what the SDK raises."""

    async def write(self, data: bytes) -> None:
        """To its stdin, whole and in order."""

    async def close_stdin(self) -> None: ...
    async def wait(self) -> None:
        """Until it ended, whatever its status; an error when that cannot be known."""

    async def kill(self) -> None: ...


class Machine(Protocol):
    """A provider's sandbox. Its methods raise what the SDK raises."""

    @property
    def id(self) -> str: ...
    @property
    def notes(self) -> Sequence[str]:
        """What of it is not as asked for: the user is warned."""

    async def run(
        self, script: str, *, out: Callable[[bytes], None], err: Callable[[bytes], None]
    ) -> Running:
        """Start a script of `sh` with a stdin; its output is handed over as it comes."""

    async def extend(self, seconds: int) -> None:
        """Live at least so long from now."""

    async def end(self) -> None:
        """Remove it. May be called when it is gone."""


class Rented(NamedTuple):
    """A sandbox of ours, as the provider lists it."""

    id: str
    made_from: str
    labels: Mapping[str, str]
    started: float
    """Seconds since the epoch."""


C = TypeVar("C", bound=Terms, contravariant=True)


class Provider(Protocol[C]):
    """One provider's sandboxes. Its methods raise what the SDK raises."""

    @property
    def name(self) -> str:
        """The backend's."""

    @property
    def title(self) -> str:
        """As people write it."""

    @property
    def module(self) -> str:
        """The SDK's, which is imported when it is needed and not before."""

    @property
    def text(self) -> bool:
        """Whether a program's output is handed on as text, which not every byte survives."""

    @property
    def stays(self) -> bool:
        """Whether one with a `persistent_filesystem` whose time is over is stopped, so that `again` starts it
        with its files."""

    # And, where it is so, `lasting = True`: such a one is itself what is kept of its task, and `again`
    # refuses settings that it was not made with.

    def missing(self) -> Health | None:
        """What has to be installed or set here before anything works. Quick: nobody else is asked."""

    async def greet(self) -> str:
        """Ask the provider whether it knows us, and make nothing; what is fine, for people."""

    async def create(self, config: C, *, life: int, labels: Mapping[str, str], key: str) -> Machine:
        """A new one that is running. The key is the same in each attempt at the same sandbox."""

    async def again(self, config: C, id: str, *, life: int) -> Machine | None:
        """That sandbox, started where it had stopped, or one with its files; None when it is no more."""

    async def rented(self) -> list[Rented]:
        """Those with our labels."""

    async def remove(self, id: str) -> None:
        """May be called when it is gone."""

    async def why_lost(self, id: str) -> str:
        """What became of a sandbox whose pipe broke, for people; empty when it is still there."""

    def understood(self, error: Exception) -> Failure:
        """What any exception of the SDK means."""
