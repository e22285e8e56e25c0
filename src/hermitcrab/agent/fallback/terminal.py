"""Pseudo-terminals."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import termios

# Linux's, on most architectures; the `termios` module does not have them.
_UNLOCK, _NUMBER = 0x40045431, 0x80045430
_IUTF8 = 0x4000


def open_terminal(rows: int, columns: int) -> tuple[int, int]:
    """Our end and the program's."""
    try:
        master, slave = os.openpty()
    except OSError:
        master, slave = _open_own_instance()
    os.set_blocking(master, False)
    if sys.platform.startswith("linux"):
        _know_utf8(slave)
    resize(master, rows, columns)
    return master, slave


def _know_utf8(fd: int) -> None:
    try:
        settings = termios.tcgetattr(fd)
        settings[0] |= _IUTF8
        termios.tcsetattr(fd, termios.TCSANOW, settings)
    except termios.error:  # a kernel that does not know it has a terminal all the same
        pass


def _open_own_instance() -> tuple[int, int]:
    """Linux: a container may have its own /dev/pts without a /dev/ptmx."""
    master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY)
    try:
        fcntl.ioctl(master, _UNLOCK, bytes(4))
        (number,) = struct.unpack("I", fcntl.ioctl(master, _NUMBER, bytes(4)))
        return master, os.open(f"/dev/pts/{number}", os.O_RDWR | os.O_NOCTTY)
    except OSError:
        os.close(master)
        raise


def resize(fd: int, rows: int, columns: int) -> None:
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


def take_control(fd: int) -> None:
    """Makes it the controlling terminal of the session that we lead."""
    fcntl.ioctl(fd, termios.TIOCSCTTY, 0)


def end_of_file(fd: int) -> bytes:
    """The character that says so when it is typed; empty where there is none."""
    try:
        character: bytes = termios.tcgetattr(fd)[6][termios.VEOF]
    except termios.error:
        return b""
    return character.strip(b"\0")
