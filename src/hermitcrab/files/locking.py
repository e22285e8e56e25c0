"""One program at a time changes a root on the host."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hermitcrab.errors import TransferError
from hermitcrab.files.incoming import working_directory
from hermitcrab.files.manifest import WORKING

_LOCK, _IGNORE = "lock", ".gitignore"
_PAUSE = 0.02


@contextmanager
def locked(base: Path, patience: float) -> Iterator[None]:
    """Hold the root's lock. It ends with the program, however that ends. Blocking: for a thread."""
    working = base / WORKING
    descriptor = _acquired(working, time.monotonic() + patience, base)
    try:
        yield
    finally:
        # While we still hold it: whoever waits for this file sees that it is gone, and takes the next one.
        _tidy(working)
        os.close(descriptor)


def _acquired(working: Path, give_up: float, base: Path) -> int:
    while True:
        working_directory(working)
        with suppress(FileNotFoundError):  # tidied away between the two lines
            descriptor = os.open(working / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if _taken(descriptor, working / _LOCK):
                return descriptor
            os.close(descriptor)
        if time.monotonic() > give_up:
            raise TransferError(f"another program is still bringing files back to {base}")
        time.sleep(_PAUSE)


def _taken(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _tidy(working: Path) -> None:
    with suppress(OSError):
        if set(os.listdir(working)) <= {_LOCK, _IGNORE}:
            for name in (_IGNORE, _LOCK):
                with suppress(FileNotFoundError):
                    os.unlink(working / name)
            working.rmdir()
