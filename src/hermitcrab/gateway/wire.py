"""What the gateway and its clients say to each other: names and numbers alone, for both sides."""

from __future__ import annotations

from enum import StrEnum

IDEMPOTENCY_KEY = "x-idempotency-key"
EXTENSIONS = "x-hermitcrab-gateway"
"""A header of every answer of ours: its value is the version of what we can beyond the fixed calls."""
EXTENSIONS_VERSION = "1"
LONGEST_WAIT = 30.0
"""Seconds that `?wait=` may hold a start or a poll; an old client sends none and is answered at once."""
CPU, MEMORY_MIB = 1.0, 5120
"""What a client that does not say otherwise asks for."""
LIFE_MS = 3_600_000
LEAST_IDLE_MS = 300_000


class Status(StrEnum):
    """How far an exec is."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"

    @property
    def over(self) -> bool:
        return self not in (Status.QUEUED, Status.RUNNING)
