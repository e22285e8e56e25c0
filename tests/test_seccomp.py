"""The seccomp filter: what it answers, by a small BPF machine, and what the real kernel makes of it."""

from __future__ import annotations

import platform
import re
import struct
import subprocess
from pathlib import Path

import pytest

from hermitcrab.backends import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, EAFNOSUPPORT = (0x00050000 | number for number in (1, 38, 97))
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386, ARM = 0x40000003, 0x40000028
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
NUMBERS = {
    "x86_64": {"clone": 56, "clone3": 435, "ioctl": 16, "socket": 41, "read": 0, "ptrace": 101},
    "aarch64": {"clone": 220, "clone3": 435, "ioctl": 29, "socket": 198, "read": 63, "ptrace": 117},
}
MACHINES = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


def answer(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """What the kernel's interpreter would return; only the instructions that the filter uses."""
    padded = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, audit, 0, *padded)
    accumulator, position = 0, 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("<HBBI", program, position * 8)
        position += 1
        match code:
            case 0x20:
                (accumulator,) = struct.unpack_from("<I", data, k)
            case 0x06:
                return int(k)
            case 0x15:
                position += if_true if accumulator == k else if_false
            case 0x25:
                position += if_true if accumulator > k else if_false
            case 0x45:
                position += if_true if accumulator & k else if_false
            case _:
                raise AssertionError(f"instruction {code:#x}")


def asked(machine: str, call: str, *arguments: int) -> int:
    return answer(seccomp.deny_list(machine), AUDIT[machine], NUMBERS[machine][call], *arguments)


@MACHINES
@pytest.mark.parametrize("call", ["read", "ptrace"])
def test_ordinary_calls_pass(machine: str, call: str) -> None:
    assert asked(machine, call) == ALLOW


@MACHINES
def test_clone_makes_processes_and_threads_but_no_namespace(machine: str) -> None:
    assert asked(machine, "clone", 0x11) == ALLOW  # SIGCHLD: fork
    assert asked(machine, "clone", 0x3D0F00) == ALLOW  # pthread_create
    for shift in (17, 25, 26, 27, 28, 29, 30):
        assert asked(machine, "clone", 0x11 | 1 << shift) == EPERM
    assert asked(machine, "clone3", 0) == ENOSYS


@MACHINES
def test_the_high_half_of_an_argument_hides_nothing(machine: str) -> None:
    assert asked(machine, "ioctl", 0, 0x5412) == EPERM
    assert asked(machine, "ioctl", 0, 0x5412 | 1 << 40) == EPERM
    assert asked(machine, "ioctl", 0, 0x541C) == EPERM
    assert asked(machine, "ioctl", 0, 0x5413) == ALLOW  # TIOCGWINSZ
    assert asked(machine, "clone", 0x10000000 | 1 << 40) == EPERM


@MACHINES
def test_socket_families(machine: str) -> None:
    families = {family: asked(machine, "socket", family) for family in range(46)}
    assert {family for family, result in families.items() if result == ALLOW} == {1, 2, 10, 16}
    assert families[40] == EAFNOSUPPORT


@MACHINES
def test_foreign_and_unjudged_calls(machine: str) -> None:
    program, read = seccomp.deny_list(machine), NUMBERS[machine]["read"]
    for foreign in (I386, ARM, 0, 0xFFFFFFFF, *(AUDIT[other] for other in AUDIT if other != machine)):
        assert answer(program, foreign, read) == KILL
    for number in (seccomp.NEWEST_JUDGED + 1, 512, 0x40000000 | read, 0xFFFFFFFF):
        assert answer(program, AUDIT[machine], number) == ENOSYS


@MACHINES
def test_golden(machine: str) -> None:
    program, audit = seccomp.deny_list(machine), AUDIT[machine]
    steps = list(struct.iter_unpack("<HBBI", program))
    assert steps[:4] == [(0x20, 0, 0, 4), (0x15, 1, 0, audit), (0x06, 0, 0, KILL), (0x20, 0, 0, 0)]
    assert steps[-1] == (0x06, 0, 0, ALLOW)
    column = seccomp.machines().index(machine)
    listed = {row[column] for row in seccomp._DENIED.values()} - {None}
    answers = {number: answer(program, audit, number) for number in range(seccomp.NEWEST_JUDGED + 1)}
    assert {number for number, result in answers.items() if result == EPERM} == listed
    others = {number: result for number, result in answers.items() if result not in (EPERM, ALLOW)}
    assert others == {NUMBERS[machine]["clone3"]: ENOSYS, NUMBERS[machine]["socket"]: EAFNOSUPPORT}
    assert len(listed) == {"x86_64": 43, "aarch64": 40}[machine]


@MACHINES
def test_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text()))
    column = seccomp.machines().index(machine)
    listed = {name: row[column] for name, row in seccomp._DENIED.items()} | NUMBERS[machine]
    # Calls that one machine does not have are None here and absent there.
    assert listed == {name: int(found[name]) if name in found else None for name in listed}


# Given the filter's bytes on stdin it takes the filter on itself, then tries: 0 ends well, else the errno.
TRY = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
program = ctypes.create_string_buffer(sys.stdin.buffer.read())
steps = (ctypes.sizeof(program) - 1) // 8
fprog = struct.pack("HxxxxxxP", steps, ctypes.addressof(program))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, fprog, 0, 0) == 0
result = libc.syscall(*map(int, sys.argv[1:]))
sys.exit(ctypes.get_errno() if result < 0 else 0)
"""


@pytest.mark.skipif(platform.machine() not in seccomp.machines(), reason="no list for this machine")
@pytest.mark.parametrize(
    ("name", "arguments", "errno"),
    [("keyctl", [0, -3, 0], 1), ("unshare", [0], 1), ("bpf", [0, 0, 0], 1), ("io_uring_setup", [1, 0], 1)],
)
def test_the_kernel_loads_and_obeys_it(name: str, arguments: list[int], errno: int) -> None:
    machine = platform.machine()
    number = seccomp._DENIED[name][seccomp.machines().index(machine)]
    words = [str(number), *map(str, arguments)]
    done = subprocess.run(["python3", "-c", TRY, *words], input=seccomp.deny_list(machine), check=False)
    assert done.returncode == errno


@pytest.mark.skipif(platform.machine() not in seccomp.machines(), reason="no list for this machine")
def test_the_kernel_gives_other_families_and_unjudged_calls_the_softer_errors() -> None:
    program, calls = seccomp.deny_list(platform.machine()), NUMBERS[platform.machine()]
    for words, errno in (((calls["socket"], 40, 1, 0), 97), ((calls["socket"], 1, 1, 0), 0), ((9999,), 38)):
        done = subprocess.run(["python3", "-c", TRY, *map(str, words)], input=program, check=False)
        assert done.returncode == errno, words
