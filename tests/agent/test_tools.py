"""The file tools of the C agent, as programs: `agent --files VERB ...`."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from hermitcrab.files import tar
from hermitcrab.files.tar import Entry

PARTLY = tar.header(Entry(b"d/f", "file", 0o644, 1 << 20)) + bytes(1 << 19)


def run(agent: str, *arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [agent, "--files", *map(str, arguments)], input=stdin, capture_output=True, timeout=30
    )


def archive(*entries: Entry) -> bytes:
    return (
        b"".join(tar.header(entry) + b"new".ljust(512, b"\0") * bool(entry.size) for entry in entries)
        + tar.END
    )


def below(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


FOLDER, LINK = Entry(b"d", "directory", 0o755), Entry(b"l", "link", 0o777, target=b"../outside")


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(archive(LINK, Entry(b"l/f", "file", 0o644, 3)), id="through a link of its own"),
        pytest.param(archive(Entry(b"old/f", "file", 0o644, 3)), id="through a link that is there"),
        pytest.param(archive(Entry(b"old", "directory", 0o755)), id="a directory in a link's place"),
        pytest.param(archive(Entry(b"../outside/f", "file", 0o644, 3)), id="upwards"),
        pytest.param(archive(Entry(b"/outside", "file", 0o644, 3)), id="absolute"),
        pytest.param(
            archive(LINK, Entry(b"h", "hard link", 0, target=b"l/f")), id="a hard link through a link"
        ),
        pytest.param(archive(Entry(b"h", "hard link", 0, target=b"../outside/f")), id="a hard link upwards"),
        pytest.param(archive(Entry(b"h", "hard link", 0, target=b"old")), id="a hard link to a link"),
        pytest.param(archive(FOLDER, Entry(b"d", "file", 0o644, 3)), id="a file in a directory's place"),
        pytest.param(archive(Entry(b"n" * 300, "file", 0o644, 3)), id="a name too long"),
        pytest.param(archive(Entry(b"/".join([b"n" * 200] * 25), "file", 0o644, 3)), id="a path too long"),
        pytest.param(archive(FOLDER)[:700], id="cut off"),
        pytest.param(PARTLY, id="cut off in a file"),
        pytest.param(b"nonsense" * 64, id="nonsense"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_goes_too_far_is_refused(c_agent: str, tmp_path: Path, data: bytes) -> None:
    target, outside = tmp_path / "target", tmp_path / "outside"
    target.mkdir()
    outside.mkdir()
    (outside / "f").write_text("safe")
    (target / "old").symlink_to("../outside")
    done = run(c_agent, "unpack", "0", target, stdin=data)
    assert done.returncode == 1
    assert done.stderr
    assert ((outside / "f").read_text(), below(outside)) == ("safe", {"f"})
    assert below(target) <= {"old", "l", "d"}


def test_a_termination_takes_back_what_is_half_there(c_agent: str, tmp_path: Path) -> None:
    process = subprocess.Popen([c_agent, "--files", "unpack", "0", tmp_path], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(PARTLY)
    process.stdin.flush()
    while not list((tmp_path / "d").glob(".hermitcrab-*")):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    process.stdin.close()
    assert below(tmp_path) == {"d"}


def test_modes_come_last_and_a_directory_that_was_there_keeps_its_own(c_agent: str, tmp_path: Path) -> None:
    root = Entry(b".", "directory", 0o700, mtime_ns=5)
    closed = Entry(b"c", "directory", 0o500, mtime_ns=7 * 10**9 + 1)
    data = archive(root, closed, Entry(b"c/f", "file", 0o4711, 3, mtime_ns=10**9 + 3))
    tmp_path.chmod(0o755)
    assert run(c_agent, "unpack", "0", tmp_path, stdin=data).returncode == 0
    assert run(c_agent, "unpack", "0", tmp_path / "new/one", stdin=data).returncode == 0
    assert [path.stat().st_mode & 0o7777 for path in (tmp_path, tmp_path / "new/one")] == [0o755, 0o700]
    for place in (tmp_path / "c", tmp_path / "new/one/c"):
        folder, file = place.stat(), (place / "f").stat()
        assert (folder.st_mode & 0o7777, folder.st_mtime_ns) == (0o500, 7 * 10**9 + 1)
        assert (file.st_mode & 0o7777, file.st_mtime_ns, file.st_size) == (0o4711, 10**9 + 3, 3)


def test_owners_are_given_where_that_is_asked_and_allowed(c_agent: str, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may give files away")
    data = archive(
        Entry(b"d", "directory", 0o755, uid=5, gid=6), Entry(b"d/f", "file", 0o6755, 3, uid=1 << 30, gid=9)
    )
    for owners, expected in (("0", (0, 0)), ("1", (1 << 30, 9))):
        assert run(c_agent, "unpack", owners, tmp_path / owners, stdin=data).returncode == 0
        status = (tmp_path / owners / "d/f").stat()
        assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (*expected, 0o6755)
    packed = run(c_agent, "pack", "0", tmp_path / "1").stdout
    owned = {part.path: (part.uid, part.gid) for part in tar.Reader().feed(packed) if isinstance(part, Entry)}
    assert owned == {b".": (0, 0), b"d": (5, 6), b"d/f": (1 << 30, 9)}


def test_a_path_longer_than_the_system_takes_can_be_packed_walked_and_removed(
    c_agent: str, tmp_path: Path
) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(40):
        os.mkdir("n" * 200, dir_fd=here)
        deeper = os.open("n" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    longest = b"/".join([b"n" * 200] * 40)
    walked = run(c_agent, "walk", tmp_path)
    assert (walked.returncode, longest in walked.stdout) == (0, True)
    packed = list(tar.Reader().feed(run(c_agent, "pack", "0", tmp_path).stdout))
    assert isinstance(packed[-1], Entry)
    assert packed[-1].path == longest
    assert run(c_agent, "remove", "1", "0", tmp_path / ("n" * 200)).returncode == 0
    assert below(tmp_path) == set()


@pytest.mark.parametrize("name", [b"../x\0", b"/etc\0", b"a//b\0", b".\0", b"cut off", b"n" * 5000 + b"\0"])
@pytest.mark.parametrize("verb", ["pack", "remove-many"])
def test_a_name_that_is_none_is_refused(c_agent: str, tmp_path: Path, verb: str, name: bytes) -> None:
    flags = ["1"] if verb == "pack" else []
    assert run(c_agent, verb, *flags, tmp_path, stdin=name).returncode == 1


@pytest.mark.parametrize("words", [["nonsense", "x"], ["walk"], ["stat", "1"], ["walk", "a", "b"]])
def test_a_wrong_command_line_is_refused(c_agent: str, words: list[str]) -> None:
    assert run(c_agent, *words).returncode == 2


def test_what_is_not_there_has_a_status_of_its_own(c_agent: str, tmp_path: Path) -> None:
    for words in (["stat", "1"], ["walk"], ["list"], ["remove", "1", "0"], ["pack", "0"]):
        assert run(c_agent, *words, tmp_path / "missing").returncode == 3, words
    assert run(c_agent, "remove", "1", "1", tmp_path / "missing").returncode == 0
