"""A seccomp filter as a classic BPF program: what a sandboxed shell has no business asking the kernel for.

A deny list, because any program may run inside. The namespaces and the lost capabilities are the wall; this
takes away kernel code behind which holes are found again and again. It follows Docker's default profile.
`ptrace` stays: it reaches nothing outside the sandbox, and debuggers and leak checkers need it.
Assembled here because PyPI's `pyseccomp` needs a libseccomp.so that the host may not have.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

# Newer calls look as on an older kernel, since nobody here has judged them. On x86_64 this also
# refuses the x32 numbers, a second way (0x40000000 and up) to ask for the same calls.
NEWEST_JUDGED = 466

_DENIED: dict[str, tuple[int | None, int | None]] = {
    # name: (x86_64, aarch64)
    # mounts and namespaces: the ways out of the mount tree
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "unshare": (272, 97),
    "setns": (308, 268),
    # keyrings are not namespaced: the session's keys are the host's
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large kernel surfaces that a shell does not need
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "lookup_dcookie": (212, 18),
    "uselib": (134, None),
    # the machine itself
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
}


class _Machine(NamedTuple):
    column: int
    audit: int
    clone: int
    clone3: int
    ioctl: int
    socket: int


_MACHINES = {
    "x86_64": _Machine(0, 0xC000003E, clone=56, clone3=435, ioctl=16, socket=41),
    "aarch64": _Machine(1, 0xC00000B7, clone=220, clone3=435, ioctl=29, socket=198),
}

# NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE_NEW = 0x7E020000
# Both put input into a terminal as if it had been typed.
_TERMINAL_INJECTION = (0x5412, 0x541C)
# UNIX, INET, INET6, NETLINK. AF_VSOCK, for one, passes by the network namespace to the hypervisor.
_FAMILIES = (1, 2, 10, 16)

_KILL, _ERRNO, _ALLOW = 0x80000000, 0x00050000, 0x7FFF0000
# Linux's numbers, whatever system this is assembled on.
_EPERM, _ENOSYS, _EAFNOSUPPORT = _ERRNO | 1, _ERRNO | 38, _ERRNO | 97

_LOAD, _RETURN, _IF_EQUAL, _IF_GREATER, _IF_ANY_BIT = 0x20, 0x06, 0x15, 0x25, 0x45
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16

Instruction = tuple[int, int, int, int]


def machines() -> tuple[str, ...]:
    """The machines (`uname -m`) that `deny_list` knows."""
    return tuple(_MACHINES)


def deny_list(machine: str) -> bytes:
    """The filter for that machine, as `bwrap --seccomp` reads it."""
    known = _MACHINES[machine]
    numbers = [row[known.column] for row in _DENIED.values()]
    program = [
        _load(_ARCHITECTURE),
        # A 32-bit call has other numbers: a filter that let it by would filter nothing.
        (_IF_EQUAL, 1, 0, known.audit),
        _answer(_KILL),
        _load(_NUMBER),
        *_when(_IF_GREATER, NEWEST_JUDGED, _ENOSYS),
        # Its flags lie in memory, which no filter can read. The C library then falls back to clone.
        *_when(_IF_EQUAL, known.clone3, _ENOSYS),
        *(step for number in numbers if number is not None for step in _when(_IF_EQUAL, number, _EPERM)),
        *_on_call(known.clone, _argument(0), _when(_IF_ANY_BIT, _CLONE_NEW, _EPERM)),
        *_on_call(known.ioctl, _argument(1), _any_of(_TERMINAL_INJECTION, _EPERM)),
        *_on_call(known.socket, _argument(0), [*_any_of(_FAMILIES, _ALLOW), _answer(_EAFNOSUPPORT)]),
        _answer(_ALLOW),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in program)


def _load(offset: int) -> Instruction:
    return (_LOAD, 0, 0, offset)


def _argument(index: int) -> Instruction:
    # The low half alone: the kernel too ignores the rest of a flag, a request or a family.
    return _load(_ARGUMENTS + 8 * index)


def _answer(action: int) -> Instruction:
    return (_RETURN, 0, 0, action)


def _when(test: int, value: int, action: int) -> list[Instruction]:
    return [(test, 0, 1, value), _answer(action)]


def _any_of(values: Sequence[int], action: int) -> list[Instruction]:
    return [step for value in values for step in _when(_IF_EQUAL, value, action)]


def _on_call(number: int, load: Instruction, rules: list[Instruction]) -> list[Instruction]:
    """Rules about an argument. They end in an answer, as the number is no longer loaded after them."""
    body = [load, *rules, _answer(_ALLOW)]
    return [(_IF_EQUAL, 0, len(body), number), *body]
