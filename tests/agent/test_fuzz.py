"""Hostile bytes: the codec raises ProtocolError and nothing else, the C agent ends by itself and cleanly."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermitcrab.agent import build, wire
from hermitcrab.agent.wire import Ask, Decoder, Fd, FdKind, Frame, ProtocolError, Start

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
STREAMS = 250
"""Byte streams for the agent. Each costs one process."""

texts = st.binary(max_size=40).map(lambda b: b.replace(b"\0", b""))
frames = st.builds(
    Frame, st.integers(0, 255), st.integers(0, 255), st.integers(0, 2**32 - 1), st.binary(max_size=300)
)


def encode(frame: Frame) -> bytes:
    return wire.frame(frame.type, frame.exec_id, frame.channel, frame.payload)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


def joined(frames: list[Frame]) -> list[Frame]:
    """DATA frames may be handed on in pieces; the stream that they are part of must be the same."""
    whole: list[Frame] = []
    for each in frames:
        streamed = each.type in (wire.Ask.DATA, wire.Tell.DATA)
        if streamed and whole and whole[-1][:3] == each[:3]:
            whole[-1] = each._replace(payload=whole[-1].payload + each.payload)
        else:
            whole.append(each)
    return whole


class TestCodec:
    @QUICK
    @given(st.lists(frames, max_size=8), st.lists(st.integers(0, 10**6), max_size=20), st.binary(max_size=50))
    def test_any_chunking(self, sent: list[Frame], cuts: list[int], noise: bytes) -> None:
        noise = noise.replace(b"\0", b"")
        decoder = Decoder(skip_noise=True)
        stream = noise + wire.PREAMBLE + b"".join(map(encode, sent))
        received = [frame for piece in pieces(stream, cuts) for frame in decoder.feed(piece)]
        assert joined(received) == joined(sent)

    @QUICK
    @given(st.binary(max_size=200), st.booleans(), st.booleans(), st.lists(st.integers(0, 10**6), max_size=5))
    def test_garbage(self, garbage: bytes, greeted: bool, skip_noise: bool, cuts: list[int]) -> None:
        decoder = Decoder(skip_noise=skip_noise)
        try:
            for piece in pieces((wire.PREAMBLE if greeted else b"") + garbage, cuts):
                for frame in decoder.feed(piece):
                    parse_anything(frame.payload)
        except ProtocolError:
            pass

    @QUICK
    @given(st.binary(max_size=200))
    def test_garbage_payload(self, payload: bytes) -> None:
        parse_anything(payload)

    @QUICK
    @given(
        st.lists(texts, min_size=1, max_size=5),
        st.lists(texts, max_size=5),
        texts,
        texts,
        st.booleans(),
        st.dictionaries(
            st.integers(0, 254), st.tuples(st.sampled_from(FdKind), st.binary(max_size=20)), max_size=8
        ),
    )
    def test_start_round_trip(
        self,
        argv: list[bytes],
        env: list[bytes],
        cwd: bytes,
        program: bytes,
        inherit: bool,
        kinds: dict[int, tuple[FdKind, bytes]],
    ) -> None:
        fds: list[Fd] = []
        for number, (kind, content) in kinds.items():
            if kind is FdKind.SAME and fds:
                fds.append(Fd.same_as(number, fds[-1].number))
            elif kind is FdKind.CONTENT:
                fds.append(Fd(number, kind, content))
            elif kind is not FdKind.SAME:
                fds.append(Fd(number, kind))
        start = Start(argv, fds, env, cwd, program, inherit)
        (frame,) = Decoder(skip_noise=False).feed(wire.PREAMBLE + wire.start_frame(7, start))
        assert wire.parse_start(frame.payload) == start

    @QUICK
    @given(st.randoms(use_true_random=False))
    def test_mutated_start(self, chance: random.Random) -> None:
        payload = wire.start_frame(1, harmless_start(chance))[12:]
        try:
            wire.parse_start(mutate(payload, chance))
        except ProtocolError:
            pass


def parse_anything(payload: bytes) -> None:
    parsers = (wire.parse_start, wire.parse_u32, wire.parse_two_u32, wire.parse_hello, wire.parse_exit)
    for parse in parsers:
        try:
            parse(payload)
        except ProtocolError:
            pass


def harmless_start(chance: random.Random) -> Start:
    """Well-formed, and of a program that no mutation is likely to turn into one that exists."""
    fds = [Fd(0, FdKind.INPUT), Fd(1, FdKind.OUTPUT), Fd.same_as(2, 1), Fd(247, FdKind.OUTPUT)]
    fds.append(Fd(9, FdKind.CONTENT, chance.randbytes(chance.randrange(100))))
    program = b"/nonexistent/" + b"x" * 20
    return Start(
        [program, *(b"argument" * chance.randrange(3) for _ in range(chance.randrange(4)))],
        fds[: chance.randrange(len(fds) + 1)],
        [b"PATH=/nonexistent", b"A=1"],
        b"/" if chance.random() < 0.5 else b"",
        program,
        chance.random() < 0.3,
    )


def mutate(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randrange(4)):
        if not changed:
            break
        at = chance.randrange(len(changed))
        match chance.randrange(4):
            case 0:
                changed[at] = chance.choice([0, 1, 4, 127, 128, 254, 255, chance.randrange(256)])
            case 1:
                del changed[at : at + chance.randrange(1, 9)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                changed[at:at] = changed[at : at + chance.randrange(1, 30)]
    return bytes(changed)


def stream(chance: random.Random) -> bytes:
    """What a broken client may send: mostly sensible frames, some of them damaged."""
    parts = [wire.PREAMBLE]
    for _ in range(chance.randrange(12)):
        exec_id, channel = chance.randrange(1, 4), chance.choice([0, 1, 2, 9, 247])
        small = chance.choice([0, 1, 50, 2**31, 2**32 - 1])
        made = [
            wire.start_frame(exec_id, harmless_start(chance)),
            wire.frame(Ask.DATA, exec_id, channel, chance.randbytes(chance.randrange(300))),
            wire.frame(Ask.CLOSE, exec_id, channel),
            wire.credit(Ask.CREDIT, exec_id, channel, small),
            wire.signal_frame(exec_id, chance.choice([1, 15, 9, 64, 65, 0, 255])),
            wire.kill_frame(exec_id, small),
            wire.timer_frame(exec_id, small, small),
        ]
        part = chance.choice(made)
        parts.append(mutate(part, chance) if chance.random() < 0.3 else part)
    if chance.random() < 0.1:
        return mutate(b"".join(parts), chance)
    if chance.random() < 0.05:
        return chance.randbytes(100)
    return b"".join(parts)


@pytest.fixture(scope="module")
def checked_agent(tmp_path_factory: pytest.TempPathFactory, c_agent: str) -> str:
    """With sanitizers where the compiler has them, else the plain one."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    target = tmp_path_factory.mktemp("fuzz") / "agent"
    flags = ["-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    if (
        compiler
        and subprocess.run(
            [compiler, *flags, "-o", target, *build.SOURCES], stderr=subprocess.DEVNULL
        ).returncode
        == 0
    ):
        return str(target)
    return c_agent


@pytest.mark.parametrize("shard", range(5))
def test_agent_survives_hostile_streams(checked_agent: str, shard: int, tmp_path: Path) -> None:
    # Supervisors close their stderr, so what a sanitizer finds goes to files.
    env = {
        "ASAN_OPTIONS": f"log_path={tmp_path}/report:exitcode=66",
        "UBSAN_OPTIONS": f"log_path={tmp_path}/report:print_stacktrace=1:exitcode=66",
        "PATH": "/nonexistent",
    }
    for seed in range(shard, STREAMS, 5):
        data = stream(random.Random(seed))
        done = subprocess.run([checked_agent], input=data, stdout=subprocess.PIPE, env=env, timeout=20)
        assert done.returncode in (0, 3), f"seed {seed}"
        # What it says is well-formed, whatever it heard.
        answers = Decoder(skip_noise=False).feed(done.stdout)
        assert answers[0].type == wire.Tell.HELLO
        assert (answers[-1].type == wire.Tell.ERROR) == (done.returncode == 3), f"seed {seed}"
    assert [report.read_text() for report in tmp_path.iterdir()] == []
