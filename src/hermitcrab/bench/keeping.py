"""Snapshots beside what people do by hand: the engine's own `commit`, and a tar of what that leaves out."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hermitcrab
from hermitcrab.bench.beside import Rows, given, opened, row_of, scratch, unless_missing
from hermitcrab.bench.places import used_once
from hermitcrab.bench.stats import scaled
from hermitcrab.bench.timing import Life, lives
from hermitcrab.snapshots import forget_snapshot

_TURNS = 10
FILL = (
    "mkdir -p /workspace/many && cd /workspace && head -c 16000000 /dev/zero >large && "
    'for n in {1..1000}; do echo "file $n" >many/$n; done'
)
_WHAT = "1000 small files and 16 MB"


def bubblewrap_snapshots(scale: float) -> Rows:
    """Beside a bare tar of the same files, by the host."""
    titles = _titles("bubblewrap")

    def measure() -> Rows:
        opened("bubblewrap").cleanup()
        with scratch() as directory:
            by_hand = _Tar(directory)
            return _measured("bubblewrap", {}, by_hand, ("tar c", "tar x"), titles, scale)

    return unless_missing(titles, measure)


def docker_snapshots(scale: float, image: str | None) -> Rows:
    """Beside `docker commit`, and tars through `docker exec`."""
    titles = _titles("docker")

    def measure() -> Rows:
        settings = {"image": given(image, "--image IMAGE")}
        opened("docker", **settings).cleanup()
        with scratch() as directory, _Committed(settings["image"], directory) as by_hand:
            raw = ("docker commit, docker exec tar c", "docker run, docker exec tar x")
            return _measured("docker", settings, by_hand, raw, titles, scale)

    return unless_missing(titles, measure)


def _titles(kind: str) -> dict[str, str]:
    return {
        f"{kind}-snapshot": f"{kind}: snapshot() of {_WHAT}",
        f"{kind}-restore": f"{kind}: open(snapshot=...), first command",
    }


def _measured(
    kind: str,
    settings: Mapping[str, Any],
    by_hand: Any,
    raw_titles: tuple[str, str],
    titles: Mapping[str, str],
    scale: float,
) -> Rows:
    with hermitcrab.open(kind, **settings) as env:
        env.execute(FILL).check()
        count = scaled(_TURNS, scale, at_least=1)
        keeps, _ = lives(
            {"ours": Life(env.snapshot, forget_snapshot), "raw": Life(by_hand.keep, by_hand.forget)}, count
        )
        id, kept = env.snapshot(), by_hand.keep()
        begins, _ = lives(
            {
                "ours": Life(lambda: used_once(hermitcrab.open(snapshot=id)), hermitcrab.Environment.cleanup),
                "raw": Life(lambda: by_hand.begin(kept), by_hand.end),
            },
            count,
        )
        by_hand.forget(kept)
        forget_snapshot(id)
    return [
        row_of(f"{kind}-snapshot", titles, keeps, raw_titles[0]),
        row_of(f"{kind}-restore", titles, begins, raw_titles[1]),
    ]


class _Tar:
    """The files alone, without a sandbox around them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        workspace = directory / "workspace"
        workspace.mkdir()
        with hermitcrab.open("bubblewrap", workspace=workspace) as env:
            env.execute(FILL).check()

    def keep(self) -> Path:
        path = self._directory / secrets.token_hex(4)
        _run(["tar", "-C", str(self._directory / "workspace"), "-cf", str(path), "."])
        return path

    def forget(self, path: Path) -> None:
        path.unlink()

    def begin(self, path: Path) -> Path:
        place = path.with_name(f"{path.name}-{secrets.token_hex(4)}")
        place.mkdir()
        _run(["tar", "-C", str(place), "-xf", str(path)])
        return place

    def end(self, place: Path) -> None:
        _run(["rm", "-r", str(place)])


class _Committed:
    """A container with its workspace in memory, as ours have it, kept by the engine's own commands."""

    def __init__(self, image: str, directory: Path) -> None:
        self._directory = directory
        self._name = self._started(image)
        _run(["docker", "exec", self._name, "bash", "-c", FILL])

    def __enter__(self) -> _Committed:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._name)

    def keep(self) -> str:
        image = f"hermitcrab-bench:{secrets.token_hex(4)}"
        _run(["docker", "commit", self._name, image])
        with open(self._file(image), "wb") as file:
            _run(["docker", "exec", self._name, "tar", "-C", "/workspace", "-c", "."], stdout=file)
        return image

    def forget(self, image: str) -> None:
        _run(["docker", "rmi", image])
        self._file(image).unlink()

    def begin(self, image: str) -> str:
        name = self._started(image)
        with open(self._file(image), "rb") as file:
            _run(["docker", "exec", "-i", name, "tar", "-C", "/workspace", "-x"], stdin=file)
        return name

    def end(self, name: str) -> None:
        _run(["docker", "rm", "--force", name])

    def _file(self, image: str) -> Path:
        return self._directory / image.partition(":")[2]

    def _started(self, image: str) -> str:
        name = f"hermitcrab-bench-{secrets.token_hex(6)}"
        own = ["--detach", "--rm", "--name", name, "--tmpfs", "/workspace:exec", "--entrypoint", "sleep"]
        _run(["docker", "run", *own, image, "3600"])
        return name


def _run(argv: list[str], **options: Any) -> None:
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(argv, check=True, **{**quiet, **options})
