"""Whole trees in and out of the sandbox, and what is in them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hermitcrab.errors import TransferError
from hermitcrab.files.entries import Limits, Progress
from hermitcrab.testing.inside import raised, say, scratch, works
from hermitcrab.testing.suite import Opener, case

_NAMES = ("plain", "with space", "-n", "*", "ünï", "'quoted\"", "line\nbreak", "\udcff\udcfe", "~", "a" * 255)
_HERE = "shopt -s dotglob nullglob; here () { for d; do (cd $d; echo *); done | paste -sd ' '; }; here"
_DEEP = "/".join(["d" * 60] * 6)


@contextmanager
def _host() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def _plant(root: Path) -> None:
    """Every kind of entry and name, with modes of its own."""
    (root / _DEEP).mkdir(parents=True)
    for number, name in enumerate(_NAMES):
        (root / name).write_bytes(bytes([number]) * number)
    (root / _DEEP / "large").write_bytes(bytes(range(251)) * 5000)
    (root / "program").write_text("#!/bin/sh\necho ran\n")
    (root / "program").chmod(0o751)
    (root / "empty").mkdir(mode=0o700)
    (root / "sub").mkdir()
    (root / "sub" / "up").symlink_to("../plain")
    (root / "nowhere").symlink_to("missing")
    (root / "closed").mkdir()
    (root / "closed" / "inside").write_text("seen")
    (root / "closed").chmod(0o555)
    os.utime(root / "plain", ns=(10**9, 1_600_000_000 * 10**9))


def seen(root: Path) -> dict[str, object]:
    """All of a tree that a transfer keeps."""
    found: dict[str, object] = {}
    for path in sorted(root.rglob("*"), key=str):
        status = path.lstat()
        if path.is_symlink():
            what: object = os.readlink(path)
        else:
            what = path.read_bytes() if path.is_file() else None
        mode = 0 if path.is_symlink() else status.st_mode
        found[str(path.relative_to(root))] = (mode, what, 0 if what is None else status.st_mtime_ns // 10**9)
    return found


@case
def a_tree_travels_there_and_back(open: Opener) -> None:
    """Names, bytes, modes, links, empty directories and times of a tree are the same after both ways."""
    env = open()
    scratch(env)
    told: list[Progress] = []
    with _host() as place:
        source, target = place / "source", place / "target"
        _plant(source)
        env.files.upload(source, "made/there", progress=told.append)
        assert say(env, "made/there/program; cat made/there/closed/inside made/there/-n | wc -c") == "ran\n6"
        env.files.download("made/there", target, progress=told.append)
        assert seen(target) == seen(source)
        assert told[-1].files == len(seen(source))
        assert say(env, f"{_HERE} . made") == "made there"
        (source / "closed").chmod(0o755)
        (target / "closed").chmod(0o755)


@case
def what_is_there_is_told_made_and_removed(open: Opener) -> None:
    """`list`, `walk`, `stat`, `exists`, `mkdir` and `remove` see and do what commands see and do."""
    env = open()
    directory = scratch(env)
    say(env, "mkdir -p d/e; printf 12345 >d/$'x\\ny'; chmod 640 d/x*; mkfifo d/p")
    say(env, "ln -s d link; ln -s nowhere broken")
    listed = {each.path: each for each in env.files.list()}
    assert list(listed) == ["broken", "d", "link"]
    assert (listed["broken"].kind, listed["broken"].target) == ("link", "nowhere")
    walked = {each.path: each.kind for each in env.files.walk("d")}
    assert walked == {"e": "directory", "x\ny": "file", "p": "other"}
    info = env.files.stat("link/x\ny")
    assert (info.path, info.kind, info.size, info.mode) == ("link/x\ny", "file", 5, 0o640)
    assert (env.files.stat("link").kind, env.files.stat("link", follow=False).kind) == ("directory", "link")
    there = [each for each in ("d", "broken", "d/x\ny/z", "none") if env.files.exists(each)]
    assert there == ["d"]
    assert "none" in str(raised(TransferError, lambda: env.files.stat("none")))
    assert "list d/p" in str(raised(TransferError, lambda: env.files.list("d/p")))
    env.files.mkdir("m/n", mode=0o750)
    env.files.mkdir(f"{directory}/m/n")
    assert env.files.stat("m/n").mode == 0o750
    raised(TransferError, lambda: env.files.mkdir("m", parents=False))
    raised(TransferError, lambda: env.files.mkdir("q/r", parents=False))
    raised(TransferError, lambda: env.files.remove("m"))
    raised(TransferError, lambda: env.files.remove("none"))
    env.files.remove("none", missing_ok=True)
    env.files.remove("m/n")
    env.files.remove("link", recursive=True)
    env.files.remove_many(".", ["broken", "d/x\ny", "d/none", "m"])
    assert say(env, f"{_HERE} . d") == "d e p"
    env.files.remove("d", recursive=True)
    assert env.files.list() == []


@case
def a_tree_goes_among_what_is_there(open: Opener) -> None:
    """A tree leaves alone what it does not name, replaces links and does not follow them."""
    env = open()
    scratch(env)
    say(env, "mkdir -p here/both outside; echo safe >outside/f")
    say(env, "echo kept >here/both/kept; echo old >here/both/new")
    say(env, "ln -s ../outside/f here/both/link; ln -s ../outside here/away; chmod 701 here")
    with _host() as place:
        (place / "both").mkdir()
        for name in ("new", "link"):
            (place / "both" / name).write_text(name)
        env.files.upload(place, "here")
        assert say(env, "(cd here/both; cat kept new link ../../outside/f)") == "kept\nnewlinksafe"
        assert env.files.stat("here").mode == 0o701
        (place / "away").mkdir()
        (place / "away" / "f").write_text("through a link")
        assert "away" in str(raised(TransferError, lambda: env.files.upload(place, "here")))
    env.files.unpack("copy", env.files.pack("here", ["both/new", "away", "both", "gone"]))
    assert {each.path: each.kind for each in env.files.walk("copy")} == {
        "both": "directory",
        "both/new": "file",
        "away": "link",
    }
    env.files.unpack("copy2", env.files.pack("here", exclude=["both/new", "away"]))
    assert {each.path for each in env.files.walk("copy2")} == {"both", "both/kept", "both/link"}
    assert say(env, f"cat outside/f; {_HERE} outside .") == "safe\nf copy copy2 here outside"


@case
def a_refused_tree_leaves_the_host_as_it_was(open: Opener) -> None:
    """Too much, or a link that leads out, is an error that says so; nothing of the tree is on the host."""
    env = open()
    scratch(env)
    say(
        env, "mkdir -p t/a/b; echo 1 >t/a/f; echo 2 >t/a/b/f; cd t; for i in {1..300}; do : >n$i; done; cd .."
    )
    with _host() as place:
        target = place / "target"
        for limits in (Limits(entries=100), Limits(bytes=3), Limits(depth=2), Limits(path_bytes=4)):
            raised(TransferError, partial(env.files.download, "t", target, limits=limits))
            assert os.listdir(place) == []
        say(env, "ln -s /etc/passwd t/out")
        error = raised(TransferError, lambda: env.files.download("t", target))
        assert "outward_links" in str(error)
        target.mkdir()
        (target / "n1").mkdir()
        raised(TransferError, lambda: env.files.download("t", target, limits=Limits(outward_links=True)))
        assert seen(target).keys() == {"n1"}
        (target / "n1").rmdir()
        (target / "mine").write_text("kept")
        env.files.download("t", target, limits=Limits(outward_links=True))
        assert (target / "mine").read_text() == "kept"
        assert os.readlink(target / "out") == "/etc/passwd"
        assert len(seen(target)) == 300 + 6
        raised(TransferError, lambda: env.files.upload(place / "missing", "x"))
        raised(TransferError, lambda: env.files.download("missing", target))
    works(env)
