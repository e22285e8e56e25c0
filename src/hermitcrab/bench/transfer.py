"""Trees into a container and out of it, beside `tar` through the engine's own `exec`."""

from __future__ import annotations

import os
import tempfile
from contextlib import closing
from pathlib import Path

from hermitcrab.bench.beside import Rows, given, opened, ratio_of, row_of, unless_missing
from hermitcrab.bench.raw_places import Container
from hermitcrab.bench.rows import at_most
from hermitcrab.bench.stats import scaled
from hermitcrab.bench.timing import interleaved

MEGABYTE = 1_000_000
SIZE = 100
"""Megabytes, in files of one each."""
_ROUNDS = 9
_THERE = "/tmp"
_TITLES = {"docker-upload": "docker: upload {} MB", "docker-download": "docker: download {} MB"}


def docker_files(scale: float, image: str | None) -> Rows:
    """100 MB up and down."""
    size = scaled(SIZE, min(1.0, scale * 4))
    titles = {name: title.format(size) for name, title in _TITLES.items()}
    return unless_missing(titles, lambda: _docker_files(scale, given(image, "--image IMAGE"), size, titles))


def _docker_files(scale: float, image: str, size: int, titles: dict[str, str]) -> Rows:
    rounds = scaled(_ROUNDS, scale)
    with (
        tempfile.TemporaryDirectory() as place,
        opened("docker", image=image) as env,
        closing(Container("docker", image, "--tmpfs", _THERE)) as container,
    ):
        source, ours, raw = (os.path.join(place, name) for name in ("source", "ours", "raw"))
        for directory in (source, ours, raw):
            os.mkdir(directory)
        _fill(Path(source), size)
        ups = interleaved(
            {
                "ours": lambda: env.files.upload(source, f"{_THERE}/tree"),
                "raw": lambda: container.upload(source, _THERE),
            },
            rounds,
            block=1,
        )
        downs = interleaved(
            {
                "ours": lambda: env.files.download(f"{_THERE}/tree", ours),
                "raw": lambda: container.download(_THERE, raw),
            },
            rounds,
            block=1,
        )
    up, down = at_most(ratio_of(ups), 2), at_most(ratio_of(downs), 2)
    return [
        row_of("docker-upload", titles, ups, "tar -c | docker exec -i NAME tar -x", up),
        row_of("docker-download", titles, downs, "docker exec NAME tar -c | tar -x", down),
    ]


def _fill(directory: Path, size: int) -> None:
    for number in range(size):
        (directory / f"{number:03}").write_bytes(os.urandom(MEGABYTE))
