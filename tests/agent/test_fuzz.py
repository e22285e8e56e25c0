"""Hostile bytes: the codec raises ProtocolError and nothing else, the C agent ends by itself and cleanly."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hermitcrab.agent import build, wire
from hermitcrab.agent.wire import Ask, Decoder, Fd, FdKind, Frame, ProtocolError, Start

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
STREAMS = 250
"""Byte streams for the agent. Each costs one process."""

TOKEN = bytes(range(16))

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
            elif kind is FdKind.TERMINAL and all(fd.kind is not kind for fd in fds):
                fds.append(Fd.terminal(number, len(content), 80))
            elif kind not in (FdKind.SAME, FdKind.TERMINAL):
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
    parsers = (
        wire.parse_start,
        wire.parse_u32,
        wire.parse_two_u32,
        wire.parse_size,
        wire.parse_read,
        wire.parse_write,
        wire.parse_hello,
        wire.parse_exit,
        wire.parse_known,
    )
    for parse in parsers:
        try:
            parse(payload)
        except ProtocolError:
            pass


def harmless_start(chance: random.Random) -> Start:
    """Well-formed, and of a program that no mutation is likely to turn into one that exists."""
    fds = [Fd(0, FdKind.INPUT), Fd(1, FdKind.OUTPUT), Fd.same_as(2, 1), Fd(247, FdKind.OUTPUT)]
    fds.append(Fd(9, FdKind.CONTENT, chance.randbytes(chance.randrange(100))))
    if chance.random() < 0.3:
        fds[0] = Fd.terminal(0, chance.randrange(2**16), 80)
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


# Relative ones are below the agent's own directory, however they are mutated.
READ_PATHS = (b"/proc/nonexistent/" + b"x" * 30, b"/proc/version", b"/proc", b"/proc/self/" + b"y" * 300)
WRITE_PATHS = (b"here/" + b"x" * 30, b"y" * 20, b"z" * 300)


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
            wire.frame(Ask.PING),
            wire.resize_frame(exec_id, channel, 50, 132),
            wire.read_frame(exec_id, chance.choice(READ_PATHS), small, small),
            wire.write_frame(exec_id, chance.choice(WRITE_PATHS), mode=0o600, parents=chance.random() < 0.5),
            wire.frame(Ask.FORGET, exec_id),
        ]
        part = wire.attach_frame(TOKEN, 60) if chance.random() < 0.01 else chance.choice(made)
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


@pytest.fixture
def reporting(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which sanitizers write to files: supervisors close their stderr."""
    reports = tmp_path / "reports"
    reports.mkdir()
    yield {
        "ASAN_OPTIONS": f"log_path={reports}/report:exitcode=66",
        "UBSAN_OPTIONS": f"log_path={reports}/report:print_stacktrace=1:exitcode=66",
        "PATH": "/nonexistent",
    }
    assert [report.read_text() for report in reports.iterdir()] == []


@pytest.mark.parametrize("shard", range(5))
def test_agent_survives_hostile_streams(
    checked_agent: str, reporting: dict[str, str], shard: int, tmp_path: Path
) -> None:
    for seed in range(shard, STREAMS, 5):
        data = stream(random.Random(seed))
        done = subprocess.run(
            [checked_agent], input=data, stdout=subprocess.PIPE, env=reporting, cwd=tmp_path, timeout=20
        )
        assert done.returncode in (0, 3), f"seed {seed}"
        # What it says is well-formed, whatever it heard.
        answers = Decoder(skip_noise=False).feed(done.stdout)
        assert answers[0].type == wire.Tell.HELLO
        assert (answers[-1].type == wire.Tell.ERROR) == (done.returncode == 3), f"seed {seed}"


def test_an_agent_that_serves_survives_hostile_clients(
    checked_agent: str, reporting: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    command = [checked_agent, "--serve", str(path)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, env=reporting, cwd=tmp_path)
    assert server.stderr is not None
    with server, server.stderr as errors:
        assert errors.read() == b""  # it lets go of it once it listens
        for seed in range(STREAMS):
            chance = random.Random(seed)
            greeting = wire.PREAMBLE + wire.attach_frame(TOKEN, 60)
            hostile = mutate(greeting, chance) if chance.random() < 0.2 else greeting
            answers = talk(path, hostile + stream(chance)[len(wire.PREAMBLE) :])
            assert [frame for frame in answers if frame.type not in set(wire.Tell)] == [], f"seed {seed}"
        assert talk(path, greeting)[-1].type != wire.Tell.ERROR
        server.terminate()
        assert server.wait(20) == 0


def talk(path: Path, data: bytes) -> list[Frame]:
    """Says all of it, and hears what comes until the other side has nothing more to say."""
    decoder = Decoder(skip_noise=False)
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(20)
        link.connect(str(path))
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
        except (BrokenPipeError, OSError):
            pass  # it heard enough
        answers: list[Frame] = []
        try:
            while piece := link.recv(1 << 16):
                answers += decoder.feed(piece)
        except ConnectionResetError:
            pass
    return answers
