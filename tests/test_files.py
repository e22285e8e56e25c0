"""Trees between the host and a sandbox: any name, hostile archives, memory, what is left after a failure."""

from __future__ import annotations

import asyncio
import inspect
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hermitcrab
from hermitcrab import HermitcrabWarning
from hermitcrab.agent.program import CHOICE
from hermitcrab.errors import TransferError
from hermitcrab.files import tar
from hermitcrab.files.access import AsyncFiles
from hermitcrab.files.archive import HostTree, Inspector, leads_inside, rewritten
from hermitcrab.files.blocking import Files
from hermitcrab.files.entries import FileInfo, Limits, Progress, Records
from hermitcrab.files.staging import Staging
from hermitcrab.files.tar import Entry
from hermitcrab.testing.cases.trees import seen
from hermitcrab.testing.inside import say

MB = 1 << 20


def test_both_faces_offer_the_same() -> None:
    def public(face: type) -> dict[str, object]:
        return {name: member for name, member in vars(face).items() if not name.startswith("_")}

    mine, theirs = public(Files), public(AsyncFiles)
    assert list(mine) == list(theirs)
    for name, member in mine.items():
        twin = theirs[name]
        assert callable(member)
        assert callable(twin)
        assert inspect.getdoc(member) == inspect.getdoc(twin), name
        own, other = (inspect.signature(each).parameters.values() for each in (member, twin))
        assert [(each.name, each.kind, each.default) for each in own] == [
            (each.name, each.kind, each.default) for each in other
        ], name


parts = st.binary(min_size=1, max_size=120).map(lambda raw: raw.replace(b"\0", b"x").replace(b"/", b"y"))
paths = st.lists(parts.filter(lambda part: part not in (b".", b"..")), min_size=1, max_size=4).map(b"/".join)


def drawn(
    path: bytes, kind: tar.EntryKind, mode: int, content: bytes, mtime: int, uid: int
) -> tuple[Entry, bytes]:
    content = content if kind == "file" else b""
    target = path[::-1] if kind == "link" else b""
    return Entry(path, kind, mode, len(content), mtime, target, uid, 1), content


entries = st.builds(
    drawn,
    paths,
    st.sampled_from(["file", "directory", "link"]),
    st.integers(0, 0o7777),
    st.binary(max_size=1500),
    st.integers(0, 2**33 * 10**9 - 1),
    st.integers(0, 2**32 - 1),
)


def archived(items: list[tuple[Entry, bytes]]) -> bytes:
    return (
        b"".join(tar.header(entry) + content + bytes(tar.padding(len(content))) for entry, content in items)
        + tar.END
    )


def read(data: bytes, step: int = 1 << 20) -> list[tuple[Entry, bytes]]:
    reader, found = tar.Reader(), list[tuple[Entry, bytes]]()
    for at in range(0, len(data), step):
        for part in reader.feed(data[at : at + step]):
            if isinstance(part, Entry):
                found.append((part, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + part)
    reader.end()
    return found


@given(st.lists(entries, max_size=5), st.sampled_from([7, 300, 512, 5000]))
@settings(deadline=None, max_examples=80)
def test_what_is_written_is_read(items: list[tuple[Entry, bytes]], step: int) -> None:
    data = archived(items)
    assert read(data, step) == items
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as other:
        assert [os.fsencode(member.name) for member in other] == [entry.path for entry, _ in items]
        assert [member.size for member in other] == [len(content) for _, content in items]


@pytest.mark.parametrize("format_", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_what_others_write_is_read(format_: int) -> None:
    names = ["short", "d" * 30 + "/" + "e" * 60, "\udcff\udc80"]
    if format_ != tarfile.USTAR_FORMAT:
        names += ["n" * 200, "/".join(["p" * 100] * 5)]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format_, errors="surrogateescape") as writer:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size, info.mode, info.mtime, info.uid = 3, 0o4755, 1.5, 7
            writer.addfile(info, io.BytesIO(b"abc"))
            link = tarfile.TarInfo("link-" + name[:80].replace("/", "-"))
            link.type, link.linkname = tarfile.SYMTYPE, name
            writer.addfile(link)
    found = read(buffer.getvalue())
    files = [(entry.path, entry.mode, entry.uid, content) for entry, content in found if entry.kind == "file"]
    assert files == [(os.fsencode(name), 0o4755, 7, b"abc") for name in names]
    assert [entry.target for entry, _ in found if entry.kind == "link"] == [
        os.fsencode(name) for name in names
    ]
    if format_ == tarfile.PAX_FORMAT:
        assert {entry.mtime_ns for entry, _ in found if entry.kind == "file"} == {1_500_000_000}


@given(st.binary(max_size=3000), st.integers(0, 4000))
@settings(deadline=None, max_examples=200)
def test_a_damaged_archive_is_refused_or_read(noise: bytes, at: int) -> None:
    good = archived([(Entry(b"a/" + b"n" * 150, "file", 0o644, 700), b"c" * 700)])
    data = good[:at] + noise + good[at + len(noise) :]
    try:
        assert all(".." not in os.fsdecode(entry.path).split("/") for entry, _ in read(data))
    except TransferError:
        assert data != good


def hostile(*members: tarfile.TarInfo, contents: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as writer:
        for member in members:
            writer.addfile(member, io.BytesIO(contents[: member.size]))
    return buffer.getvalue()


def member(name: str, type_: bytes = tarfile.REGTYPE, target: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size, info.mode = type_, target, size, 0o755
    return info


def lying(size: int) -> bytes:
    return tar.header(Entry(b"f", "file", 0o644, size)) + b"x" * 512


def resized(entry: Entry, size: bytes) -> bytes:
    block = bytearray(tar.header(entry))
    block[124:136] = size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + tar.END


def sparse() -> tarfile.TarInfo:
    info = member("f")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 50)}
    return info


def pax(body: bytes) -> bytes:
    block = bytearray(tar.header(Entry(b"pax", "file", 0o644, len(body))))
    block[156:157], block[148:156] = b"x", b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + body.ljust(512, b"\0")


LINK, HARD, FOLDER = tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE
HOSTILE: dict[str, bytes] = {
    "absolute": hostile(member("/etc/evil")),
    "upwards": hostile(member("../evil")),
    "upwards_in_the_middle": hostile(member("a/../../evil")),
    "device": hostile(member("dev", tarfile.CHRTYPE)),
    "disk": hostile(member("dev", tarfile.BLKTYPE)),
    "pipe": hostile(member("fifo", tarfile.FIFOTYPE)),
    "unknown_type": hostile(member("odd", b"Q")),
    "link_to_the_root": hostile(member("l", LINK, "/etc")),
    "link_upwards": hostile(member("d/l", LINK, "../../x")),
    "link_upwards_by_a_detour": hostile(member("d/l", LINK, ".."), member("m", LINK, "d/l/../..")),
    "through_a_link": hostile(member("d", FOLDER), member("l", LINK, "d"), member("l/evil")),
    "through_a_file": hostile(member("f"), member("f/evil")),
    "link_in_place_of_a_directory": hostile(member("d", FOLDER), member("d", LINK, "x"), member("d/evil")),
    "file_twice": hostile(member("f"), member("f")),
    "file_then_directory": hostile(member("f"), member("f", FOLDER)),
    "hard_link_upwards": hostile(member("h", HARD, "../evil")),
    "hard_link_to_the_root": hostile(member("h", HARD, "/etc/passwd")),
    "hard_link_to_nothing": hostile(member("h", HARD, "nothing")),
    "hard_link_to_a_link": hostile(member("d", FOLDER), member("l", LINK, "d"), member("h", HARD, "l")),
    "root_is_a_link": hostile(member(".", LINK, "x")),
    "too_many": hostile(*(member(f"f{i}") for i in range(101))),
    "too_large": hostile(member("f", size=2000), contents=bytes(2000)),
    "too_large_by_its_word": lying(1 << 50),
    "too_large_together": hostile(*(member(f"f{i}", size=600) for i in range(2)), contents=bytes(600)),
    "too_deep": hostile(member("/".join("d" * 11))),
    "too_long": hostile(member("n" * 300)),
    "name_in_the_name": hostile(member("n" * 70_000)),
    "cut_off": hostile(member("f", size=900), contents=b"x" * 900)[:1000],
    "no_end": tar.header(Entry(b"f", "file", 0o644)),
    "nothing": b"",
    "noise": os.urandom(2048),
    "negative_size": resized(Entry(b"f", "file", 0o644), b"-0000000001\0"),
    "negative_size_by_gnu": resized(Entry(b"f", "file", 0o644), b"\xff" * 12),
    "directory_with_a_size": resized(Entry(b"d", "directory", 0o755), b"00000001000\0") + bytes(512),
    "sparse": hostile(sparse()),
    "headers_without_an_entry": pax(b"9 key=a\n") * 10 + hostile(member("f")),
    "no_end_of_the_end": bytes(2 * MB),
}
SMALL = Limits(bytes=1000, entries=100, depth=10, path_bytes=255)


def receive(data: bytes, target: Path) -> None:
    staging = Staging(target, SMALL)
    try:
        staging.begin()
        for at in range(0, len(data), 1000):
            staging.feed(data[at : at + 1000])
        staging.commit()
    finally:
        staging.discard()


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_the_host_untouched(name: str, exists: bool, tmp_path: Path) -> None:
    target = tmp_path / "in" / "target"
    target.parent.mkdir()
    if exists:
        target.mkdir()
        (target / "mine").write_text("kept")
    before = seen(tmp_path)
    with pytest.raises(TransferError):
        receive(HOSTILE[name], target)
    assert seen(tmp_path) == before


def test_what_a_hostile_archive_may_not_is_refused_on_its_way_to_another_sandbox() -> None:
    async def passed(data: bytes) -> bytes:
        async def pieces() -> AsyncIterator[bytes]:
            yield data

        return b"".join([piece async for piece in rewritten(pieces())])

    for name in ("absolute", "upwards", "device", "pipe", "unknown_type", "hard_link_upwards", "cut_off"):
        with pytest.raises(TransferError):
            asyncio.run(passed(HOSTILE[name]))
    items = [(Entry(b"d/l", "link", 0o777, target=b"/etc"), b""), (Entry(b"f", "file", 0o644, 2), b"ab")]
    assert asyncio.run(passed(archived(items))) == archived(items)


def test_a_hostile_sandbox_is_refused(
    quiet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tar of its own making, in a sandbox that is asked through tar."""
    programs, target = tmp_path / "programs", tmp_path / "target"
    programs.mkdir()
    (tmp_path / "evil").write_bytes(HOSTILE["upwards"])
    (programs / "tar").write_text(
        f'#!/bin/bash\n[[ $1 != --version ]] || {{ echo GNU; exit; }}\ncat "{tmp_path}/evil"\n'
    )
    (programs / "tar").chmod(0o755)
    monkeypatch.setenv(CHOICE, "python")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    with hermitcrab.open("local") as env:
        before = seen(tmp_path)
        with pytest.raises(TransferError, match="leaves its directory"):
            env.files.download(env.cwd, target)
        assert seen(tmp_path) == before


def test_without_tar_the_error_says_what_to_install(
    quiet_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "mkdir", "stat", "readlink"):
        (programs / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv(CHOICE, "python")
    monkeypatch.setenv("PATH", str(programs))
    with hermitcrab.open("local") as env:
        for action in (
            partial(env.files.upload, tmp_path, "x"),
            partial(env.files.download, ".", tmp_path / "t"),
        ):
            with pytest.raises(TransferError, match="there is no tar in the sandbox: install it"):
                action()
        assert env.files.stat(".").kind == "directory"


LONG = b"f 644 1 1 1 1 " + b"x" * 20_000 + b"\0\0"


def understood(text: bytes) -> list[FileInfo]:
    records = Records()
    found = records.feed(text)
    records.end()
    return found


@pytest.mark.parametrize(
    "text", [b"nonsense\0\0", b"f 644 1 1 1 1 a", b"f x 1 1 1 1 a\0\0", b"x" * 200_000, LONG]
)
def test_nonsense_for_a_list_of_files_is_refused(text: bytes) -> None:
    with pytest.raises(TransferError):
        understood(text)


@given(st.lists(st.sampled_from([b"..", b"a", b"b", b"."]), max_size=5).map(b"/".join), paths)
def test_a_link_that_is_taken_stays_inside(target: bytes, path: bytes) -> None:
    if leads_inside(path, target):
        resolved = os.path.normpath(b"/root/" + os.path.dirname(path) + b"/" + target)
        assert (resolved + b"/").startswith(b"/root/")


file_names = (
    st.binary(min_size=1, max_size=20)
    .map(lambda raw: raw.replace(b"\0", b"x").replace(b"/", b"y"))
    .filter(lambda name: name not in (b".", b".."))
)
leaves = st.one_of(
    st.tuples(
        st.just("file"), st.binary(max_size=3000), st.sampled_from([0o600, 0o644, 0o755, 0o400, 0o000])
    ),
    st.tuples(st.just("link"), file_names, st.just(0)),
)
trees = st.recursive(
    st.dictionaries(file_names, leaves, max_size=4),
    lambda inner: st.dictionaries(file_names, st.one_of(leaves, inner), max_size=4),
    max_leaves=12,
)


def plant(root: bytes, tree: dict[bytes, object]) -> None:
    os.mkdir(root)
    for name, what in tree.items():
        path = os.path.join(root, name)
        match what:
            case dict():
                plant(path, what)
            case ("link", bytes() as target, _):
                os.symlink(target, path)
            case (_, bytes() as content, int() as mode):
                with open(path, "wb") as file:
                    file.write(content)
                os.chmod(path, mode)


@pytest.fixture(scope="module")
def env() -> Iterator[hermitcrab.Environment]:
    with tempfile.TemporaryDirectory() as place, hermitcrab.open("local", cwd=place) as environment:
        yield environment


@given(trees)
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tree_comes_back_as_it_was(env: hermitcrab.Environment, tree: dict[bytes, object]) -> None:
    with tempfile.TemporaryDirectory() as place:
        plant(os.fsencode(place) + b"/source", tree)
        source, target = Path(place, "source"), Path(place, "target")
        env.files.upload(source, "it")
        env.files.download("it", target)
        assert seen(target) == seen(source)
        assert {info.path: info.kind for info in env.files.walk("it")}.keys() == seen(source).keys()
        env.files.remove("it", recursive=True)


def test_times_are_kept_to_the_nanosecond(env: hermitcrab.Environment, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "f").write_text("")
    os.utime(tmp_path / "s" / "f", ns=(1, 1_234_567_890_123_456_789))
    env.files.upload(tmp_path / "s", "times")
    assert env.files.stat("times/f").mtime_ns == 1_234_567_890_123_456_789
    env.files.download("times", tmp_path / "t")
    assert (tmp_path / "t" / "f").stat().st_mtime_ns == 1_234_567_890_123_456_789


def test_a_program_of_the_sandboxs_does_not_become_one_that_runs_as_us(
    env: hermitcrab.Environment, tmp_path: Path
) -> None:
    env.execute("mkdir s; : >s/f; chmod 6755 s/f; chmod 2777 s")
    assert env.files.stat("s/f").mode == 0o6755
    env.files.download("s", tmp_path / "t")
    env.files.download("s/f", tmp_path / "f")
    assert [each.stat().st_mode & 0o7777 for each in (tmp_path / "t/f", tmp_path / "f")] == [0o755, 0o755]
    env.files.upload(tmp_path, "up")
    (tmp_path / "f").chmod(0o6755)
    env.files.upload(tmp_path, "up")
    assert env.files.stat("up/f").mode == 0o6755


def test_what_is_neither_file_nor_directory_nor_link_is_left_out_and_told(
    env: hermitcrab.Environment, tmp_path: Path
) -> None:
    (tmp_path / "s").mkdir()
    os.mkfifo(tmp_path / "s" / "fifo")
    with pytest.warns(HermitcrabWarning, match="fifo"):
        env.files.upload(tmp_path / "s", "nofifo")
    assert env.files.list("nofifo") == []
    with pytest.raises(TransferError, match="fifo: Not a regular file"):
        env.files.upload(tmp_path / "s" / "fifo", "x")
    env.execute("mkdir pipes; mkfifo pipes/p; : >pipes/f")
    with pytest.warns(HermitcrabWarning, match="p is no file"):
        env.files.download("pipes", tmp_path / "t")
    assert seen(tmp_path / "t").keys() == {"f"}


def huge(place: Path) -> str:
    """Would take hours to refuse by counting."""
    path = place.with_name("huge")
    path.touch()
    os.truncate(path, 1 << 42)
    return str(path)


@pytest.mark.parametrize(
    ("action", "error"),
    [
        (lambda files, place: files.remove(""), ValueError),
        (lambda files, place: files.remove("//", recursive=True), ValueError),
        (lambda files, place: files.remove_many(".", ["../x"]), ValueError),
        (lambda files, place: list(files.pack(".", ["/etc"])), ValueError),
        (lambda files, place: files.stat("n" * 5000), TransferError),
        (lambda files, place: files.mkdir("/dev/null/x"), TransferError),
        (lambda files, place: files.unpack("x", [b"nonsense" * 200]), TransferError),
        (lambda files, place: files.download(".", place / "file"), TransferError),
        (lambda files, place: files.download("/etc/passwd", place), TransferError),
        (lambda files, place: files.download(".", place / "none" / "target"), TransferError),
        (lambda files, place: files.upload(place, "/dev/null"), TransferError),
        (lambda files, place: files.upload("/dev/zero", "x"), TransferError),
        (lambda files, place: files.download("/etc/passwd", "/sys/kernel/x"), TransferError),
        (lambda files, place: files.download(huge(place), place / "huge"), TransferError),
    ],
)
def test_what_cannot_be_is_a_clear_error(
    env: hermitcrab.Environment,
    tmp_path: Path,
    action: Callable[[Files, Path], object],
    error: type[Exception],
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(error) as told:
        action(env.files, tmp_path)
    assert str(told.value)
    assert seen(tmp_path).keys() == {"file"}
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    (tmp_path / "secret").chmod(0)
    user = os.geteuid()
    tmp_path.chmod(0o755)
    try:
        if user == 0:
            os.seteuid(65534)
        with pytest.raises(TransferError, match=r"(secret|cannot read .*): Permission denied"):
            list(HostTree(tmp_path).pieces())
    finally:
        os.seteuid(user)


def test_a_large_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(MB))
    pieces = HostTree(tmp_path).pieces()
    next(pieces)
    os.truncate(tmp_path / "f", 300_000)
    with pytest.raises(TransferError, match="f shrank"):
        list(pieces)


def test_what_vanishes_while_a_tree_is_read_was_not_there(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in "abcdef":
        (tree / name / "in").mkdir(parents=True)
        (tree / name / "file").write_bytes(bytes(MB))
    pieces = HostTree(tree).pieces()
    found = [next(pieces)]
    tree.rename(tmp_path / "moved")
    for name in "abcdef":
        shutil.rmtree(tmp_path / "moved" / name)
    tree.symlink_to("/etc")
    items = read(b"".join([*found, *pieces]))
    files = [entry for entry, _ in items if entry.kind == "file"]
    assert [entry.size for entry in files] == [MB], "the one that was open"
    assert {entry.path for entry, _ in items} <= {b".", b"a", b"b", b"c", b"d", b"e", b"f"} | {
        name for each in b"abcdef" for name in (b"%c/in" % each, b"%c/file" % each)
    }, "nothing of where the link leads"


def test_two_downloads_may_have_one_new_target(tmp_path: Path) -> None:
    stagings = []
    for name in (b"first", b"second"):
        staging = Staging(tmp_path / "target", SMALL)
        staging.begin()
        staging.feed(archived([(Entry(name, "file", 0o644, 1), b"x")]))
        stagings.append(staging)
    for staging in stagings:
        staging.commit()
        staging.discard()
    assert seen(tmp_path).keys() == {"target", "target/first", "target/second"}


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_cancelled_transfer_leaves_nothing_half_done(way: str, quiet_home: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in ("one", "two"):
        (source / name).write_bytes(bytes(20 * MB))

    async def run() -> None:
        async with hermitcrab.aopen("local", cwd=str(tmp_path)) as env:
            if way == "up":
                begin = env.files.upload(source, "there", progress=lambda _: transfer.cancel())
            else:
                begin = env.files.download("source", target, progress=lambda _: transfer.cancel())
            transfer = asyncio.ensure_future(begin)
            with pytest.raises(asyncio.CancelledError):
                await transfer
            left = await env.execute(f"pgrep -f 'files (un)?pack 0 {tmp_path}'")
            assert (left.output, left.returncode) == ("", 1)

    asyncio.run(run())
    found = seen(tmp_path)
    assert not any(".hermitcrab-" in name or name.startswith("target") for name in found)
    assert all((tmp_path / name).stat().st_size == 20 * MB for name in found if name.startswith("there/"))


INTERRUPTED = """
import os, signal, sys, threading, hermitcrab
place = sys.argv[1]
heard = threading.Event()
def on_interrupt(*_):
    heard.set()
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, on_interrupt)
os.makedirs(place + "/source")
for name in "abc":
    with open(f"{place}/source/{name}", "wb") as file: file.truncate(20 << 20)
with hermitcrab.open("local", cwd=place) as env:
    pressed = []
    def stop(_):
        if not pressed:
            os.kill(os.getpid(), signal.SIGINT)
            heard.wait()  # a busy machine may be done before
        pressed.append(True)
    for transfer in (lambda: env.files.download("source", place + "/target", progress=stop),
                     lambda: env.files.upload(place + "/source", "there", progress=stop)):
        pressed.clear(); heard.clear()
        try: transfer()
        except KeyboardInterrupt: print("interrupted", flush=True)
        else: sys.exit("it went on")
    os._exit(0)
"""


def test_ctrl_c_leaves_nothing_half_done(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, tmp_path], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "interrupted\n" * 2), done.stderr
    left = {name: len(path.read_bytes()) for name in seen(tmp_path) if (path := tmp_path / name).is_file()}
    assert {name for name in left if not name.startswith("there/")} == {f"source/{name}" for name in "abc"}
    assert set(left.values()) == {20 * MB}


def test_an_exception_of_the_progress_callback_ends_the_transfer(
    env: hermitcrab.Environment, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(bytes(5 * MB))

    def stop(progress: Progress) -> None:
        raise LookupError(progress.bytes)

    with pytest.raises(LookupError):
        env.files.upload(tmp_path, "stopped", progress=stop)
    with pytest.raises(LookupError):
        env.files.upload(tmp_path / "f", "stopped-file", progress=stop)
    with pytest.raises(LookupError):
        env.files.download("/usr/bin", tmp_path / "t", progress=stop, limits=Limits(outward_links=True))
    assert seen(tmp_path).keys() == {"f"}
    assert not env.files.exists("stopped-file")
    # It may have been ended before it made the directory.
    assert say(env, "find stopped -name '*hermitcrab*' 2>/dev/null || :") == ""


def test_who_stops_reading_leaves_no_process(env: hermitcrab.Environment, tmp_path: Path) -> None:
    with open(tmp_path / "f", "wb") as file:
        file.truncate(50 * MB)
    seen_by = f"pgrep -f 'files pack 0 {tmp_path}'"
    pieces = env.files.pack(str(tmp_path))
    next(pieces)
    assert env.execute(seen_by).returncode == 0
    del pieces
    assert (
        env.execute(f"for i in {{1..200}}; do {seen_by} || exit 0; sleep 0.05; done; exit 1").returncode == 0
    )


GROWTH = """
import os, resource, sys, hermitcrab
place = sys.argv[1]
os.makedirs(place + "/small"); os.makedirs(place + "/source")
with open(place + "/source/f", "wb") as file: file.truncate(120 << 20)
with open(place + "/small/f", "wb") as file: file.truncate(5 << 20)
def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with hermitcrab.open("local", cwd=place) as env:
    env.files.upload(place + "/small", "little"); env.files.download("little", place + "/little-back")
    before = most()
    env.files.upload(place + "/source", "there"); env.files.download("there", place + "/back")
    env.files.upload(place + "/source/f", "one"); env.files.download("one", place + "/one")
    assert os.path.getsize(place + "/back/f") == os.path.getsize(place + "/one") == 120 << 20
    print(most() - before)
"""


def test_large_files_need_no_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GROWTH, tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 24 << 10, "KiB"


def test_many_entries_need_no_memory() -> None:
    """Ten million are read as a hundred thousand are."""
    block = b"".join(tar.header(Entry(b"d/%05d" % i, "file", 0o644, 0)) for i in range(1000))
    reader, inspector = tar.Reader(), Inspector(Limits())
    tracemalloc.start()
    try:
        for turn in range(5):
            for part in reader.feed(block):
                assert isinstance(part, Entry)
                inspector.admit(part)
            if turn == 0:
                first = tracemalloc.get_traced_memory()[0]
        assert tracemalloc.get_traced_memory()[0] - first < 10_000
    finally:
        tracemalloc.stop()
    assert inspector.files == 5000
