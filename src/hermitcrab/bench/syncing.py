"""A tree of small files kept in step with a sandbox: the first time, and when nothing has changed."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hermitcrab
from hermitcrab.bench.beside import Rows, given, opened, ratio_of, row_of, unless_missing
from hermitcrab.bench.rows import Goal, at_most, below
from hermitcrab.bench.stats import scaled, summarize
from hermitcrab.bench.timing import interleaved

FILES, SIZE = 1000, 1000
_DIRECTORIES = 20
_CHECKS, _FIRSTS = 50, 9
_MILLISECONDS = 1000.0
_TAR = 'set -o pipefail; tar -C "$1" -cf - . | "${@:2}"'


def docker_sync(scale: float, image: str | None) -> Rows:
    """Into a container."""

    def measure(titles: dict[str, str], count: int) -> Rows:
        with opened("docker", image=given(image, "--image IMAGE")) as env:
            exec_ = ["docker", "exec", "-i", env.sandbox_id, "tar", "-xf", "-", "-C"]
            return _measured("docker", env, exec_, "docker exec -i NAME", titles, count, scale)

    return _rows("docker", scale, measure)


def ssh_sync(scale: float, ssh: str | None, ssh_config: str | None) -> Rows:
    """To a host."""

    def measure(titles: dict[str, str], count: int) -> Rows:
        host = given(ssh, "--ssh HOST")
        settings: dict[str, Any] = {"config_file": ssh_config} if ssh_config else {}
        flags = ["-F", ssh_config] if ssh_config else []
        with opened("ssh", host=host, **settings) as env:
            return _measured(
                "ssh", env, ["ssh", *flags, host, "tar -xf - -C"], "ssh HOST", titles, count, scale
            )

    return _rows("ssh", scale, measure)


def _rows(name: str, scale: float, measure: Callable[[dict[str, str], int], Rows]) -> Rows:
    count = scaled(FILES, min(1.0, scale * 4))
    titles = {
        f"{name}-sync-first": f"{name}: first sync of {count} small files",
        f"{name}-sync-unchanged": f"{name}: sync of {count} unchanged files",
    }
    return unless_missing(titles, lambda: measure(titles, count))


def _measured(
    name: str,
    env: hermitcrab.Environment,
    unpack: list[str],
    through: str,
    titles: dict[str, str],
    count: int,
    scale: float,
) -> Rows:
    with _tree(count) as tree:
        place = env.execute("mktemp -d").check().output.strip()
        numbers = iter(range(1 << 30))

        def first() -> None:
            hermitcrab.FileSync(env.files, [f"{tree}:{place}/{next(numbers)}"]).before_command()

        def raw_first() -> None:
            subprocess.run(["bash", "-c", _TAR, "bash", tree, *unpack, place], check=True)

        firsts = interleaved({"ours": first, "raw": raw_first}, scaled(_FIRSTS, scale), block=1)
        sync = hermitcrab.FileSync(env.files, [f"{tree}:{place}/kept"])
        sync.before_command()
        checks = interleaved(
            {"ours": lambda: sync.before_command(force=True), "raw": lambda: _looked_at(tree)},
            scaled(_CHECKS, scale),
        )
        env.execute(f"rm -r {place}")
    return [
        row_of(
            f"{name}-sync-first",
            titles,
            firsts,
            f"tar -c | {through} tar -x",
            at_most(ratio_of(firsts), 1.5),
        ),
        row_of(f"{name}-sync-unchanged", titles, checks, "os.walk, os.lstat of each", _quick(checks)),
    ]


def _quick(samples: dict[str, list[float]]) -> Goal:
    return below(summarize(samples["ours"], factor=_MILLISECONDS).median, 20, "ms")


def _looked_at(tree: str) -> None:
    for directory, _, names in os.walk(tree):
        for name in names:
            os.lstat(os.path.join(directory, name))


@contextmanager
def _tree(count: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as place:
        for number in range(count):
            path = Path(place, f"d{number % _DIRECTORIES}", f"f{number}")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(SIZE))
        yield place
