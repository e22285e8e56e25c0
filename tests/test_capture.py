"""Keeping output: against a model that simply keeps everything."""

from __future__ import annotations

import codecs
import itertools
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermitcrab.core.capture import SPILL_KEPT_SECONDS, Capture

CHUNKS = st.lists(st.binary(max_size=40), max_size=30)
LIMITS = st.integers(min_value=2, max_value=200)
common = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@common
@given(chunks=CHUNKS, limit=LIMITS)
def test_nothing_is_lost(tmp_path: Path, chunks: list[bytes], limit: int) -> None:
    capture = Capture(limit, tmp_path)
    for chunk in chunks:
        capture.add(chunk)
    everything = b"".join(chunks)
    assert capture.size == len(everything)
    assert capture.truncated == (len(everything) > limit)
    assert capture.read(0, capture.size) == everything
    if capture.truncated:
        assert capture.path is not None
        assert capture.path.read_bytes() == everything
    else:
        assert capture.path is None
    capture.close()
    assert capture.read(0, len(everything)) == everything


@common
@given(chunks=CHUNKS, limit=LIMITS, start=st.integers(0, 300), size=st.integers(0, 300))
def test_any_part_can_be_read(tmp_path: Path, chunks: list[bytes], limit: int, start: int, size: int) -> None:
    capture = Capture(limit, tmp_path)
    seen = b""
    for chunk in chunks:
        capture.add(chunk)
        seen += chunk
        assert capture.read(start, size) == seen[start : start + size]
    capture.close()


@common
@given(text=st.text(min_size=1, max_size=300), limit=LIMITS, cuts=st.lists(st.integers(0, 600), max_size=8))
def test_text_is_the_whole_or_its_two_ends(tmp_path: Path, text: str, limit: int, cuts: list[int]) -> None:
    text = text.replace("\0", "")
    data = text.encode()
    capture = Capture(limit, tmp_path)
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        capture.add(data[at:cut])
        at = max(at, cut)
    shown = capture.text()
    if len(data) <= limit:
        assert shown == text
    else:
        head, _, rest = shown.partition("[... ")
        note, _, tail = rest.partition(" ...]\n")
        assert str(capture.path) in note
        assert "\ufffd" not in head + tail or "\ufffd" in text
        assert text.startswith(head.removesuffix("\n"))
        assert text.endswith(tail)
        assert len(head.encode()) + len(tail.encode()) <= limit + 1
    capture.close()


@common
@given(before=st.binary(max_size=100), after=st.binary(max_size=60), limit=LIMITS)
def test_our_own_text_can_be_taken_out(tmp_path: Path, before: bytes, after: bytes, limit: int) -> None:
    mark = b"<<ours>>"
    capture = Capture(limit, tmp_path)
    for chunk in (before, mark, after):
        capture.add(chunk)
    capture.remove_last(mark)
    whole = before + mark + after
    at = whole.rfind(mark)
    reach = max(0, len(whole) - len(mark) - limit // 2)
    expected = whole[:at] + whole[at + len(mark) :] if at >= reach else whole
    assert capture.read(0, len(whole)) == expected
    assert capture.size == len(expected)
    capture.add(b"more")
    assert capture.read(0, len(whole) + 4) == expected + b"more"
    capture.close()


@given(text=st.text(max_size=200), cuts=st.lists(st.integers(0, 800), max_size=10))
def test_decoding_in_pieces_is_decoding_the_whole(text: str, cuts: list[int]) -> None:
    data = text.encode()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [decoder.decode(data[a:b]) for a, b in itertools.pairwise(edges)]
    assert "".join(pieces) + decoder.decode(b"", final=True) == text


@common
@given(data=st.binary(max_size=200))
def test_any_bytes_give_some_text(tmp_path: Path, data: bytes) -> None:
    capture = Capture(1000, tmp_path)
    capture.add(data)
    text = capture.text()
    if b"\0" in data:
        assert text.startswith(f"[Binary output: {len(data)} bytes")
        assert capture.path is not None
        assert capture.path.read_bytes() == data
    else:
        assert text == data.decode(errors="replace")
    capture.close()


def test_memory_holds_no_more_than_the_limit(tmp_path: Path) -> None:
    capture = Capture(1000, tmp_path)
    for _ in range(1000):
        capture.add(b"x" * 1000)
        assert len(capture._head) <= 1000
    capture.close()


def test_files_are_private_and_old_ones_go(tmp_path: Path) -> None:
    directory = tmp_path / "spill"
    first = Capture(2, directory)
    first.add(b"first")
    first.close()
    assert first.path is not None
    assert first.path.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700
    long_ago = time.time() - SPILL_KEPT_SECONDS - 1
    os.utime(first.path, (long_ago, long_ago))
    second = Capture(2, directory)
    second.add(b"second")
    second.close()
    assert not first.path.exists()
    assert second.path is not None
    assert second.path.exists()


def test_a_file_that_another_program_removes_meanwhile_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanishing(directory: Path) -> Any:
        with scandir(directory) as entries:
            listed = list(entries)
        gone.unlink()
        return nullcontext(listed)

    gone, scandir = tmp_path / "output-gone", os.scandir
    gone.write_bytes(b"")
    monkeypatch.setattr(os, "scandir", vanishing)
    capture = Capture(2, tmp_path)
    capture.add(b"all of it")
    capture.close()
    assert capture.path is not None
    assert capture.path.read_bytes() == b"all of it"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said_and_is_no_end(tmp_path: Path) -> None:
    capture = Capture(4, tmp_path)
    capture.add(b"kept\n"[:4])
    capture.spill()
    assert capture._file is not None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, capture._file)
    os.close(full)
    capture.add(b"lost")
    capture.add(b"lost too")
    assert capture.lost == len(b"lostlost too")
    assert capture.truncated
    capture.close()
