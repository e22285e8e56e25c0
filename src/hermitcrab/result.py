"""What became of a command."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from hermitcrab.errors import CommandFailed, CommandInterrupted, CommandTimedOut

TIMED_OUT = 124
CANNOT_RUN = 126
INTERRUPTED = 130


class Outcome(Enum):
    """How a command ended."""

    COMPLETED = "completed"
    """It ended by itself, well or not."""
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"
    NOT_RUN = "not_run"
    """Its directory or its shell is missing: nothing of it was run."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a command used, where the platform tells."""

    user_seconds: float
    system_seconds: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """The fate of one command. `result["output"]` and `result["returncode"]` answer too."""

    output: str
    """stdout and stderr as they came, or stdout followed by stderr when they were kept apart."""
    returncode: int
    """The exit status, or 128 plus the signal that ended it; 124 after a time-out, 130 after an interrupt."""
    outcome: Outcome = Outcome.COMPLETED
    out_of_memory: bool = False
    """The sandbox's memory limit was reached meanwhile, and something in it was killed."""
    duration: float = 0.0
    """Seconds from handing the command over to its end."""
    truncated: bool = False
    """`output` holds only the head and the tail; everything is in `output_path`."""
    output_path: Path | None = None
    """The complete output as bytes, when it was too long or not text."""
    stdout: str | None = None
    """Only when asked for with `separate=True`."""
    stderr: str | None = None
    usage: Usage | None = None
    command: str = field(default="", repr=False)

    def __getitem__(self, key: str) -> Any:
        if key in ("output", "returncode"):
            return getattr(self, key)
        raise KeyError(key)

    @property
    def ok(self) -> bool:
        return self.returncode == 0

    def check(self) -> Result:
        """Itself when the command succeeded, else the `CommandError` that fits."""
        match self.outcome:
            case Outcome.TIMED_OUT:
                raise CommandTimedOut(self)
            case Outcome.INTERRUPTED:
                raise CommandInterrupted(self)
        if self.returncode != 0:
            raise CommandFailed(self)
        return self

    def summary(self) -> str:
        """One line of what happened, then the end of the output."""
        what = {
            Outcome.COMPLETED: f"exited with {self.returncode}",
            Outcome.TIMED_OUT: "timed out",
            Outcome.INTERRUPTED: "was interrupted",
            Outcome.NOT_RUN: "was not run",
        }[self.outcome]
        line = self.command.strip().partition("\n")[0]
        shown = line if len(line) <= 80 else line[:77] + "..."
        tail = "\n".join(self.output.rstrip("\n").splitlines()[-10:])
        return f"command {shown!r} {what}" + (f":\n{tail}" if tail else "")
