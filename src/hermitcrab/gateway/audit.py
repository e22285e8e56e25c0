"""The audit log: who did what, when, and how it ended, as one JSON object a line.

It holds no command, no output and no secret, unless the operator asks for the first words of commands.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from hermitcrab.errors import ConfigError
from hermitcrab.gateway.records import ExecRecord, SandboxRecord

_log = logging.getLogger("hermitcrab.gateway")
_REFUSALS_PER_SECOND = 10


class Audit:
    """Appends to a file that its owner alone can read. Also what the gateway tells about ends."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        self._descriptor = self._opened()
        self._failed = False
        self._second, self._refused = 0, 0

    def note(self, what: str, **details: Any) -> None:
        entry = {"time": round(self._clock(), 3), "what": what, **details}
        line = to_json(entry) + b"\n"
        try:
            # One write is one line, also when several processes share the file.
            os.write(self._descriptor, line)
            self._failed = False
        except OSError as error:
            if not self._failed:
                _log.error("the audit log cannot be written: %s: %s", self._path, error.strerror)
            self._failed = True

    def refused(self, *, address: str, status: int, path: str) -> None:
        """Somebody without a valid token; a flood of them must not fill the disk."""
        second = int(self._clock())
        if second != self._second:
            if self._refused > _REFUSALS_PER_SECOND:
                self.note("refused.more", count=self._refused - _REFUSALS_PER_SECOND)
            self._second, self._refused = second, 0
        self._refused += 1
        if self._refused <= _REFUSALS_PER_SECOND:
            self.note("refused", address=address, status=status, path=path[:200])

    def exec_ended(self, record: ExecRecord) -> None:
        self.note(
            "exec.end",
            tenant=record.tenant,
            sandbox=record.sandbox,
            exec=record.id,
            status=record.status,
            returncode=record.returncode,
            outputBytes=record.output_bytes,
        )

    def sandbox_ended(self, record: SandboxRecord) -> None:
        self.note("sandbox.end", tenant=record.tenant, sandbox=record.id, state=record.state)

    def reopen(self) -> None:
        """After the file was moved away by whoever rotates logs."""
        fresh = self._opened()
        os.close(self._descriptor)
        self._descriptor = fresh

    def close(self) -> None:
        os.close(self._descriptor)

    def _opened(self) -> int:
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"the audit log cannot be opened: {self._path}: {error.strerror}") from None
