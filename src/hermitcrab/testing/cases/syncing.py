"""Files of the host kept present in the sandbox, and brought back from it."""

from __future__ import annotations

import os
import secrets
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from hermitcrab.files.sync import FileSync
from hermitcrab.testing.inside import say, scratch, works
from hermitcrab.testing.suite import Opener, case

T = TypeVar("T")
ODD = "ünï 'quoted\"\n$HOME"


@contextmanager
def project() -> Iterator[Path]:
    """A small tree on the host."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "project")
        (root / "deep" / "er").mkdir(parents=True)
        (root / "empty").mkdir()
        (root / "a").write_text("old\n")
        (root / "both").write_text("old\n")
        (root / "gone").write_text("old\n")
        (root / "deep" / "er" / ODD).write_bytes(bytes(range(256)))
        (root / "run").write_text("#!/bin/sh\necho ran\n")
        (root / "run").chmod(0o755)
        (root / "link").symlink_to("deep/er")
        yield root


def warned(action: Callable[[], T]) -> tuple[T, str]:
    """What an action gives, and what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = action()
    return result, "\n".join(str(each.message) for each in caught)


@case
def host_files_are_kept_present(open: Opener) -> None:
    """A sync brings exact files, modes, links and empty directories; later ones only what changed."""
    env = open()
    with project() as root:
        there = scratch(env) + "/work"
        sync = FileSync(env.files, [f"{root}:{there}"])
        first = sync.before_command()
        assert f"{there}/a" in first.uploaded, first
        assert say(env, "cat a; ./run; readlink link; test -d empty", there) == "old\nran\ndeep/er"
        assert env.files.read(f"{there}/deep/er/{ODD}") == bytes(range(256))
        assert sync.before_command(force=True).uploaded == ()
        say(env, "echo mine >deep/own", there)
        # The same size, within the same second, and the same time to the eye.
        before = (root / "a").stat().st_mtime_ns
        (root / "a").write_text("new\n")
        os.utime(root / "a", ns=(before, before))
        (root / "gone").unlink()
        (root / "link").unlink()
        assert sync.before_command().uploaded == (), "it looks every 5 s, unless it is told to"
        again = sync.before_command(force=True)
        assert (again.uploaded, set(again.removed)) == (
            (f"{there}/a",),
            {f"{there}/gone", f"{there}/link"},
        ), again
        assert say(env, "cat a deep/own; echo *", there) == "new\nmine\na both deep empty run"


@case
def what_the_sandbox_changed_comes_back(open: Opener) -> None:
    """`sync_back` brings edits and new files; removed ones are put aside, of two versions none is lost."""
    env = open()
    with project() as root:
        there = scratch(env) + "/work"
        sync = FileSync(env.files, [f"{root}:{there}:back"])
        sync.before_command()
        say(
            env,
            "echo edited >a; echo there >both; rm gone; mkdir new; echo new >new/file; chmod +x new/file; "
            "ln -s ../a new/link; ln -s /etc/passwd new/outward; mkfifo pipe; rmdir empty",
            there,
        )
        (root / "both").write_text("here\n")
        report, said = warned(sync.sync_back)
        assert (root / "a").read_text() == "edited\n"
        assert (root / "new" / "file").read_text() == "new\n"
        assert os.access(root / "new" / "file", os.X_OK)
        assert os.readlink(root / "new" / "link") == "../a"
        assert not os.path.lexists(root / "new" / "outward")
        assert not (root / "pipe").exists()
        assert not (root / "empty").exists()
        assert not (root / "gone").exists()
        assert [Path(each).read_text() for each in report.put_aside if each.endswith("/gone")] == ["old\n"]
        assert ((root / "both").read_text(), (root / "both.from-sandbox").read_text()) == (
            "here\n",
            "there\n",
        )
        assert [each.beside for each in report.conflicts] == [f"{root}/both.from-sandbox"]
        assert "both.from-sandbox" in said
        assert "outward is a link that leads out" in said
        assert warned(sync.sync_back)[0].brought == ()
        # What the host has is now the newer version.
        sync.before_command(force=True)
        assert say(env, "cat both both.from-sandbox", there) == "here\nthere"
    works(env)


@case
def a_session_syncs_by_itself(open: Opener) -> None:
    """With the setting `sync` the files are there before anything runs, and are brought back at the end."""
    there = f"/tmp/hermitcrab-sync-{secrets.token_hex(8)}"
    with project() as root:
        env = open(sync=[f"{root}:{there}:back"], sync_exclude=["gone"], cwd=there)
        try:
            assert say(env, "pwd; cat a; echo from-there >b; echo secret >gone") == f"{there}\nold"
            assert env.sync is not None
            (root / "a").write_text("new\n")
            env.sync.before_command(force=True)
            assert "".join(env.stream("cat a")) == "new\n"
        finally:
            env.cleanup()
            if env.traits.persistent:
                say(open(), f"rm -r {there}")
        assert (root / "b").read_text() == "from-there\n"
        assert (root / "gone").read_text() == "old\n"
        assert not (root / ".hermitcrab-sync").exists()


@case
def what_both_sides_change_is_left_alone(open: Opener) -> None:
    """A sync never overwrites or removes what the sandbox has changed since; it says so, once."""
    env = open()
    with project() as root:
        there = scratch(env) + "/work"
        sync = FileSync(env.files, [f"{root}:{there}"])
        sync.before_command()
        say(env, "echo there >both; echo there >gone; rm a; mkdir a; echo x >a/x; echo own >unknown", there)
        for name in ("both", "a", "unknown"):
            (root / name).write_text("here\n")
        (root / "gone").unlink()
        report, said = warned(lambda: sync.before_command(force=True))
        assert {Path(each.host).name for each in report.conflicts} == {"a", "both", "unknown"}, report
        assert "both changed: neither was overwritten" in said
        assert say(env, "cat both gone a/x unknown", there) == "there\nthere\nx\nown"
        assert warned(lambda: sync.before_command(force=True)) == (type(report)(), "")
