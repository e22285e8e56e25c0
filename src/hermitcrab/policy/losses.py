"""Commands that destroy files: whole directories that matter, and disks."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from hermitcrab.policy.arguments import arguments
from hermitcrab.policy.builtins import EVERYTHING, search
from hermitcrab.policy.scene import Command
from hermitcrab.policy.words import UNKNOWN, Word

VITAL = (
    *("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run", "/sbin"),
    *("/sys", "/usr", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/libexec", "/usr/sbin", "/usr/share"),
    *("/var", "/var/lib", "/System", "/Library", "/private"),
)
"""Directories without which a machine does not work."""
VALUED = (
    *("/home", "/media", "/mnt", "/opt", "/root", "/srv", "/usr/local"),
    *("/Applications", "/Users", "/Volumes"),
)
"""Directories that hold what people care for."""
_HOMES = ("/home", "/Users")
_DISK = re.compile(
    r"/dev/(?:[shv]d[a-z]+\d*|xvd[a-z]+\d*|nvme\d+n\d+(?:p\d+)?|mmcblk\d+(?:p\d+)?|r?disk\d+(?:s\d+)?"
    r"|md\d+|md/.+|dm-\d+|mapper/(?!control$).+|disk/.+|pmem\d+|vg[^/]*/.+)"
)
_SOME_DISKS = ("sda", "sda1", "sdb", "hda", "vda", "vda1", "xvda", "nvme0n1", "nvme0n1p1", "mmcblk0", "disk0")


def _below(pattern: str, paths: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for path in paths)


def targets(command: Command, word: Word, places: Sequence[str]) -> bool:
    """Whether a path means one of the places, or all that is in one."""
    directory, last = posixpath.split(word.text.rstrip("/") or "/")
    if last and EVERYTHING.fullmatch(last):
        path = command.path(directory or ".")
        return path in places or command.path(word.text) in places
    path = command.path(word.text)
    return path != UNKNOWN and (path in places or (bool(set("*?[") & set(path)) and _below(path, places)))


def everything_in(command: Command, word: Word, places: Sequence[str]) -> bool:
    """Whether it means all that is in one of the places, and not the place itself."""
    directory, last = posixpath.split(word.text)
    return bool(EVERYTHING.fullmatch(last)) and command.path(directory or ".") in places


def _own_home(command: Command) -> tuple[str, ...]:
    """The user's home, and what it is in."""
    home = command.path(command.home)
    if home == UNKNOWN:
        return ()
    parents = [home]
    while parents[-1] != "/":
        parents.append(posixpath.dirname(parents[-1]))
    return tuple(parents)


def _is_a_home(command: Command, word: Word) -> bool:
    directory, last = posixpath.split(word.text.rstrip("/"))
    path = command.path(directory or "." if EVERYTHING.fullmatch(last) else word.text)
    return posixpath.dirname(path) in _HOMES


def precious(command: Command, word: Word) -> bool:
    return targets(command, word, (*VITAL, *VALUED, *_own_home(command))) or _is_a_home(command, word)


def wipes(command: Command) -> bool:
    words = command.words[1:]
    match command.program:
        case "rm" | "grm" | "srm":
            given = arguments(words)
            if given.has("help", "version"):
                return False
            if given.has("r", "R", "recursive", "d", "dir"):
                return any(precious(command, word) for word in given.operands)
            return any(everything_in(command, word, VITAL) for word in given.operands)
        case "shred" | "truncate":
            given = arguments(words, "nsri", ("iterations", "size", "random-source", "reference"))
            return any(everything_in(command, word, VITAL) for word in given.operands)
        case "find":
            return _find_wipes(command)
        case "chmod" | "chown" | "chgrp" | "setfacl":
            given = arguments(words, "mx" if command.name == "setfacl" else "", ("reference", "from"))
            recursive = given.has("R", "recursive")
            return recursive and any(targets(command, word, VITAL) for word in given.operands)
        case "mv":
            given = arguments(words, "tS", ("target-directory", "suffix"))
            moved = given.operands if given.has("t", "target-directory") else given.operands[:-1]
            return any(targets(command, word, (*VITAL, *_own_home(command))) for word in moved)
        case "rsync":
            deletes = any(word.text.startswith(("--del", "--remove-source")) for word in words)
            return deletes and bool(words) and precious(command, words[-1])
    return False


_REMOVERS = frozenset({"-delete", "rm", "shred", "unlink", "srm"})


def _find_wipes(command: Command) -> bool:
    """`find` on a precious directory that removes whatever it finds there."""
    sought = search(command.words[1:])
    removes = sought.everything and bool(_REMOVERS & set(sought.actions))
    return removes and any(precious(command, place) for place in sought.places)


def is_disk(command: Command, word: Word | str) -> bool:
    path = command.path(word if isinstance(word, str) else word.text)
    if set("*?[") & set(path) and path.startswith("/dev/"):
        return _below(path, (f"/dev/{name}" for name in _SOME_DISKS))
    return bool(_DISK.fullmatch(path))


LIST_ONLY = {
    "fdisk": ("l", "list", "x", "list-details", "s", "getsz"),
    "sfdisk": ("l", "list", "d", "dump", "J", "json", "V", "verify", "F", "list-free", "s", "show-size"),
    "gdisk": ("l",),
    "sgdisk": ("p", "print", "i", "info", "v", "verify", "L", "list-types", "O", "b", "backup", "E", "F"),
    "cfdisk": ("r", "read-only"),
    "cgdisk": (),
    "wipefs": ("n", "no-act"),
    "blkdiscard": (),
    "mkswap": (),
    "mke2fs": ("n",),
    "shred": (),
    "pvcreate": ("t", "test"),
    "mdadm": ("D", "detail", "E", "examine", "Q", "query"),
}
"""Programs that write to the disks they are given, and the options with which they only look."""
LAST_IS_TARGET = ("cp", "mv", "install", "ddrescue", "gddrescue", "rsync", "scp")
_PARTED_LOOKS = ("print", "p", "help", "unit", "version", "align-check", "quit")
DANGEROUS_WORDS = {
    "cryptsetup": ("luksFormat", "luksErase", "erase", "reencrypt", "--type"),
    "hdparm": ("--security-erase", "--security-erase-enhanced", "--trim-sector-ranges"),
    "nvme": ("format", "sanitize", "write-zeroes"),
    "zpool": ("create", "destroy", "labelclear"),
    "diskutil": ("eraseDisk", "eraseVolume", "partitionDisk", "zeroDisk", "secureErase", "reformat"),
}


def overwrites_a_disk(command: Command) -> bool:
    words, name = command.words[1:], command.program
    if any(is_disk(command, word) for word in command.writes):
        return True
    disks = [word for word in words if is_disk(command, word)]
    if name in ("dd", "dcfldd", "dc3dd"):
        return any(word.text.startswith("of=") and is_disk(command, word.text[3:]) for word in words)
    if name == "tee":
        return bool(disks)
    if name in DANGEROUS_WORDS:
        return any(word.text in DANGEROUS_WORDS[name] for word in words) and bool(
            disks or name in ("diskutil", "nvme", "zpool")
        )
    if name in LAST_IS_TARGET:
        return bool(words) and is_disk(command, words[-1])
    if not disks:
        return False
    if name == "badblocks":
        return arguments(words, "bcdeiopt").has("w")
    if name == "parted":
        doing = [word.text for word in words if not word.text.startswith("-") and word not in disks]
        return not doing or doing[0] not in _PARTED_LOOKS
    if name.startswith("mkfs"):
        return not arguments(words, "tLUmbiINEOo").has("n", "V", "help", "version")
    if name == "wipefs" and not arguments(words, "to").has("a", "all", "o", "offset"):
        return False
    return name in LIST_ONLY and not arguments(words).has(*LIST_ONLY[name], "help", "version")
