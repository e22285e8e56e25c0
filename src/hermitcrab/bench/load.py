"""Much at once: a flood of output, a crowd of environments, hundreds of idle sessions."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hermitcrab
from hermitcrab.bench import process
from hermitcrab.bench.rows import Row, below, row_to_json, share_at_least
from hermitcrab.bench.stats import Summary, ratio, scaled, summarize
from hermitcrab.bench.timing import SETTLE, interleaved, raw, swarm
from hermitcrab.bench.worker import call, empty_home

_MEBIBYTE = 1 << 20
_OUTPUT = 100 * 1_000_000
_OUTPUTS = 7
_PIECE = 1 << 16
CROWD = 32
CROWD_COMMANDS = 20
CROWD_ROUNDS = 5
_IDLE = 500
_LET_GO_AFTER = 0.2
_LET_GO_PATIENCE = 60.0
_IDLE_TIMEOUT = 600.0


def output(scale: float) -> list[dict[str, Any]]:
    """100 MB that a program prints: until all of it is here, and how much memory that takes."""
    size = scaled(_OUTPUT, min(scale, 1.0))
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory, "text")
        line = b"the quick brown hermit crab jumps over the lazy dog, again and again\n"
        text.write_bytes((line * (size // len(line) + 1))[:size])
        spills = Path(directory, "spills")
        command = f"cat {text}"
        growth: dict[str, list[float]] = {"ours": [], "raw": []}
        with hermitcrab.open("local", spill_dir=spills) as env:

            def ours() -> None:
                result = env.execute(command).check()
                if result.output_path is not None:
                    result.output_path.unlink()

            seconds = interleaved(
                {
                    "ours": lambda: _with_growth(ours, growth["ours"]),
                    "raw": lambda: _with_growth(lambda: _drain(command), growth["raw"]),
                    "kept": lambda: _drain(command, Path(directory, "kept")),
                },
                scaled(_OUTPUTS, scale),
                block=1,
            )
    rates = {name: [size / _MEBIBYTE / each for each in taken] for name, taken in seconds.items()}
    found = {name: summarize(each, higher_is_better=True) for name, each in rates.items()}
    grown = max(growth["ours"], default=0.0)
    row = Row(
        name="output",
        title=f"{size / 1_000_000:g} MB of output",
        unit="MiB/s",
        ours=found["ours"],
        raw=found["raw"],
        raw_title="Popen, read from its pipe, forget",
        higher_is_better=True,
        goals=(
            share_at_least(ratio(found["ours"], found["raw"]), 0.7),
            *([below(grown, 32, "MiB of growth")] if process.AVAILABLE else []),
        ),
        details={
            "output (MiB)": size / _MEBIBYTE,
            "raw pipe, written to a file as we do (MiB/s)": found["kept"].median,
            "memory growth at its peak, hermitcrab (MiB)": grown,
            "memory growth at its peak, raw (MiB)": max(growth["raw"], default=0.0),
        },
    )
    return [row_to_json(row)]


def _with_growth(action: Callable[[], None], growth: list[float]) -> None:
    if not process.AVAILABLE:
        return action()
    process.reset_peak()
    before = process.resident_kib()
    action()
    growth.append((process.peak_kib() - before) / 1024)
    return None


def _drain(command: str, keep: Path | None = None) -> None:
    with (
        open(keep or os.devnull, "wb", buffering=0) as file,
        subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, bufsize=0) as child,
    ):
        assert child.stdout is not None
        while data := child.stdout.read(_PIECE):
            if keep:
                file.write(data)


def crowd(scale: float) -> list[dict[str, Any]]:
    """32 environments, each used by a thread of its own, all at once."""
    callers, commands = scaled(CROWD, min(1.0, scale * 4)), scaled(CROWD_COMMANDS, min(1.0, scale * 4))
    extra: list[int] = []

    def count_threads() -> None:
        if process.AVAILABLE:
            extra.append(process.threads() - callers - 1)

    environments = [hermitcrab.open("local") for _ in range(callers)]
    try:
        ours = [lambda env=env: env.execute("true").check() for env in environments]
        rates: dict[str, list[float]] = {"ours": [], "raw": []}
        swarm(ours, 1)
        for _ in range(scaled(CROWD_ROUNDS, scale)):
            time.sleep(SETTLE * 10)
            rates["ours"].append(callers * commands / swarm(ours, commands, count_threads))
            time.sleep(SETTLE * 10)
            rates["raw"].append(callers * commands / swarm([raw("true")] * callers, commands))
    finally:
        swarm([env.cleanup for env in environments], 1)
    found = {name: summarize(each, higher_is_better=True) for name, each in rates.items()}
    row = Row(
        name="crowd",
        title=f"{callers} environments x {commands} commands at once",
        unit="commands/s",
        ours=found["ours"],
        raw=found["raw"],
        raw_title=f"{callers} threads that call subprocess.run",
        higher_is_better=True,
        goals=(share_at_least(ratio(found["ours"], found["raw"]), 0.6),),
        details={"threads beyond the callers' own": float(max(extra))} if extra else {},
    )
    return [row_to_json(row)]


def idle(scale: float) -> list[dict[str, Any]]:
    """500 open sessions that nobody uses.

    Ours and raw in two fresh processes: memory is never quite given back. With an empty home directory:
    what the user's profile takes is in the `start` row, and would be nearly all of it here.
    """
    count = scaled(_IDLE, min(scale, 2.0), at_least=3)
    names = {
        "idle-memory": (f"{count} idle sessions: memory of our process, each", "KiB"),
        "idle-start": (f"{count} sessions opened one after another", "sessions/s"),
    }
    if not process.AVAILABLE:
        return [
            row_to_json(Row(name=name, title=title, unit=unit, reason=process.MISSING))
            for name, (title, unit) in names.items()
        ]
    here = "hermitcrab.bench.load"
    ours = call(f"{here}:idle_sessions", {"count": count}, timeout=_IDLE_TIMEOUT)
    raws = call(f"{here}:idle_bashes", {"count": count}, timeout=_IDLE_TIMEOUT)
    memory, rate = _single(ours["own KiB"]), _single(ours["rate"])
    held = "Popen of a login bash that answered and waits"
    details = {
        f"{what}, {who}": found[what]
        for what in ("others' memory, each (KiB)", "threads beyond the caller's", "descriptors, each")
        for who, found in (("hermitcrab", ours), ("raw", raws))
    }
    return [
        row_to_json(
            Row(
                name="idle-memory",
                title=names["idle-memory"][0],
                unit="KiB",
                ours=memory,
                raw=_single(raws["own KiB"]),
                raw_title=held,
                goals=(below(memory.median, 1024, "KiB"),),
                details={**details, "processes left after the ready shells were let go": ours["processes"]},
            )
        ),
        row_to_json(
            Row(
                name="idle-start",
                title=names["idle-start"][0],
                unit="sessions/s",
                ours=rate,
                raw=_single(raws["rate"]),
                raw_title=held,
                higher_is_better=True,
            )
        ),
    ]


def idle_sessions(count: int) -> dict[str, float]:
    """In a worker: what sessions cost that were used once and then left alone."""
    with empty_home(), hermitcrab.open("local") as first:
        first.execute("true").check()  # whatever is needed once is there now
    environments: list[hermitcrab.Environment] = []
    try:
        with empty_home():
            found = _held(
                count, lambda: environments.append(hermitcrab.open("local", warm_seconds=_LET_GO_AFTER)), 4
            )
        for env in environments:
            env.execute("true").check()
        found["processes"] = float(_wait_for_processes(count))
        found.update(_costs(count, found))
    finally:
        swarm([env.cleanup for env in environments], 1)
    return found


def idle_bashes(count: int) -> dict[str, float]:
    """In a worker: what the shells cost that a program would hold without us."""
    bashes: list[subprocess.Popen[bytes]] = []

    def hold() -> None:
        pipe = subprocess.PIPE
        bash = subprocess.Popen(["bash", "--login"], stdin=pipe, stdout=pipe, bufsize=0)
        bashes.append(bash)
        assert bash.stdin is not None
        assert bash.stdout is not None
        bash.stdin.write(b"echo\n")
        bash.stdout.read(1)

    try:
        with empty_home():
            found = _held(count, hold, 2)
        time.sleep(_LET_GO_AFTER)
        found.update(_costs(count, found))
    finally:
        for bash in bashes:
            bash.kill()
        for bash in bashes:
            bash.communicate()
    return found


def _held(count: int, hold: Callable[[], object], descriptors_each: int) -> dict[str, float]:
    if not process.allow_descriptors(count * descriptors_each + 256):
        raise OSError(f"{count} sessions need more file descriptors than this process may open (ulimit -n)")
    before = {"resident": float(process.resident_kib()), "descriptors": float(process.descriptors())}
    start = time.perf_counter()
    for _ in range(count):
        hold()
    return {**before, "rate": count / (time.perf_counter() - start)}


def _costs(count: int, before: dict[str, float]) -> dict[str, float]:
    return {
        "own KiB": max(0.0, (process.resident_kib() - before["resident"]) / count),
        "others' memory, each (KiB)": process.proportional_kib(process.descendants()) / count,
        "threads beyond the caller's": float(process.threads() - 1),
        "descriptors, each": (process.descriptors() - before["descriptors"]) / count,
    }


def _wait_for_processes(wanted: int) -> int:
    """Until only the agents are left. How many there are, should that take too long."""
    give_up = time.monotonic() + _LET_GO_PATIENCE
    while (left := len(process.descendants())) > wanted and time.monotonic() < give_up:
        time.sleep(_LET_GO_AFTER)
    return left


def _single(value: float) -> Summary:
    return Summary(n=1, median=value, p95=value)
