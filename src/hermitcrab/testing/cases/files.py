"""Exact bytes in and out of the sandbox."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from hermitcrab.errors import TransferError
from hermitcrab.testing.inside import PATIENCE, needs, raised, say, scratch, works
from hermitcrab.testing.suite import Opener, case, each

MB = 1 << 20


@each(
    {
        "empty": b"",
        "text": b"one\ntwo\n",
        "no_last_line_break": b"one",
        "every_byte": bytes(range(256)) * 3,
        "large": bytes(range(251)) * 40_000,
    }
)
def what_is_written_is_read(open: Opener, data: bytes) -> None:
    """A file holds exactly the bytes that were written, and gives back exactly those."""
    env = open()
    scratch(env)
    env.files.write("it", data)
    assert env.files.read("it") == data
    assert say(env, "wc -c <it").strip() == str(len(data))
    needs(env, "sha256sum")
    assert say(env, "sha256sum it").split()[0] == hashlib.sha256(data).hexdigest()


@each(
    {name: name for name in ("plain", "with space", "-n", "*", "ünï", "'quoted\"", "$HOME", "~")}
    | {"line_break": "line\nbreak", "long": "a" * 200}
)
def a_file_of_any_name_can_be_written(open: Opener, name: str) -> None:
    """A name is a name, whatever a shell would make of it."""
    env = open()
    directory = scratch(env)
    env.files.write(f"{directory}/{name}", b"x")
    assert env.files.read(f"./{name}") == b"x"
    assert say(env, "cat -- *") == "x"


@case
def a_relative_path_is_meant_from_the_sessions_directory(open: Opener) -> None:
    """`env.files` sees the same `.` and `~` as the next command."""
    env = open()
    directory = scratch(env)
    say(env, "mkdir sub; cd sub; HOME=$OLDPWD; export HOME")
    env.files.write("here", "text")
    env.files.write("~/at-home", "text")
    assert say(env, f"cat {directory}/sub/here {directory}/at-home") == "texttext"


@case
def missing_directories_are_made_when_asked(open: Opener) -> None:
    """`parents` makes the directories on the way; without it a missing one is an error."""
    env = open()
    scratch(env)
    env.files.write("a/b/c", "deep")
    assert say(env, "cat a/b/c") == "deep"
    error = raised(TransferError, lambda: env.files.write("x/y", "", parents=False))
    assert "x/y" in str(error)
    assert say(env, "ls") == "a"


@case
def a_mode_is_kept_or_set(open: Opener) -> None:
    """A file that is there keeps its mode, unless another one is asked for."""
    env = open()
    scratch(env)
    say(env, "echo old >it; chmod 751 it")
    env.files.write("it", "new")
    assert say(env, "stat -c %a it; cat it") == "751\nnew"
    env.files.write("it", "#!/bin/sh\necho ran\n", mode=0o700)
    assert say(env, "stat -c %a it; ./it") == "700\nran"


@case
def a_link_is_followed(open: Opener) -> None:
    """Writing through a symbolic link changes what it points to, and leaves the link."""
    env = open()
    scratch(env)
    say(env, "mkdir d; echo old >d/real; ln -s d/real link")
    env.files.write("link", "new")
    assert say(env, "readlink link; cat d/real; ls d") == "d/real\nnewreal"


@case
def nobody_sees_half_a_file(open: Opener) -> None:
    """While a file is replaced a reader finds the old content or the new one."""
    env = open()
    scratch(env)
    old, new = "o" * MB, "n" * MB
    env.files.write("it", old)
    watcher = env.start("while test -e it; do { c=$(<it); } 2>/dev/null; echo ${#c}${c:0:1}${c: -1}; done")
    for _ in range(10):
        env.files.write("it", new)
        env.files.write("it", old)
    say(env, "rm it")
    seen = set(watcher.wait(PATIENCE).output.split())
    assert seen <= {f"{MB}oo", f"{MB}nn", "0"} | {f"{MB}{a}{a}" for a in "on"}, seen
    assert say(env, "ls -A") == ""


@each(["missing", "/no/such/file", ".", "/dev/null", "fifo", "denied/inside"])
def what_cannot_be_read_is_a_clear_error(open: Opener, path: str) -> None:
    """A missing file, a directory or a device is a TransferError that names it; the session goes on."""
    env = open()
    scratch(env)
    say(env, "mkfifo fifo; mkdir denied; ln -s denied/inside denied/inside")
    error = raised(TransferError, lambda: env.files.read(path))
    assert path.lstrip("./") in str(error)
    works(env)


@case
def a_file_can_be_read_in_part(open: Opener) -> None:
    """From an offset, at most so many bytes."""
    env = open()
    scratch(env)
    env.files.write("it", "0123456789")
    assert b"".join(env.files.chunks("it", 3, 4)) == b"3456"
    assert b"".join(env.files.chunks("it", 8)) == b"89"
    assert b"".join(env.files.chunks("it", 20)) == b""
    assert b"".join(env.files.chunks("it", most=0)) == b""


@case
def files_travel_between_host_and_sandbox(open: Opener) -> None:
    """`upload` takes the permissions along, `download` replaces its target at the end."""
    env = open()
    directory = scratch(env)
    data = bytes(range(256)) * 20_000
    with tempfile.TemporaryDirectory() as place:
        source, target = Path(place, "source"), Path(place, "target")
        source.write_bytes(data)
        source.chmod(0o640)
        env.files.upload(source, "there")
        assert say(env, "stat -c %a there") == "640"
        target.write_text("old")
        env.files.download(f"{directory}/there", target)
        assert target.read_bytes() == data
        raised(TransferError, lambda: env.files.download("missing", target))
        assert target.read_bytes() == data
        raised(TransferError, lambda: env.files.upload(Path(place, "none"), "there"))
        assert sorted(each.name for each in Path(place).iterdir()) == ["source", "target"]
