"""Moving house and forking, beside what people do by hand: tar through pipes, cp, `docker commit`."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hermitcrab
from hermitcrab.bench.beside import Rows, given, opened, row_of, scratch, unless_missing
from hermitcrab.bench.stats import scaled
from hermitcrab.bench.timing import Life, lives

_TURNS = 10
_COPIES = 2
_FILL = "mkdir many; head -c 16000000 /dev/zero >large; for n in {1..1000}; do echo $n >many/$n; done"
_WHAT = "1000 small files and 16 MB"


def bubblewrap_moves(scale: float) -> Rows:
    titles = _titles("bubblewrap")

    def measure() -> Rows:
        opened("bubblewrap").cleanup()
        with _project() as project:
            by_hand = _Directories(project)
            return _measured(
                "bubblewrap", {}, project, by_hand, ("tar c | tar x", "cp -a, two at once"), scale
            )

    return unless_missing(titles, measure)


def docker_moves(scale: float, image: str | None) -> Rows:
    titles = _titles("docker")

    def measure() -> Rows:
        settings = {"image": given(image, "--image IMAGE")}
        opened("docker", **settings).cleanup()
        raw = ("docker run, tar c | docker exec tar x", "docker commit, then run and tar, two at once")
        with _project() as project, _Containers(settings["image"], project) as by_hand:
            return _measured("docker", settings, project, by_hand, raw, scale)

    return unless_missing(titles, measure)


def _titles(kind: str) -> dict[str, str]:
    return {
        f"{kind}-move": f"move_to: local to {kind}, with {_WHAT}",
        f"{kind}-fork": f"{kind}: fork({_COPIES}), of {_WHAT}",
    }


def _measured(
    kind: str,
    settings: Mapping[str, Any],
    project: Path,
    by_hand: Any,
    raw_titles: tuple[str, str],
    scale: float,
) -> Rows:
    titles, count = _titles(kind), scaled(_TURNS, scale)
    with hermitcrab.open("local", cwd=str(project)) as here:

        def move() -> hermitcrab.Environment:
            return here.move_to(kind, keep_old=True, **settings)

        moves, _ = lives(
            {"ours": Life(move, hermitcrab.Environment.cleanup), "raw": Life(by_hand.move, by_hand.end)},
            count,
        )
        with move() as there:
            forks, _ = lives(
                {
                    "ours": Life(lambda: there.fork(_COPIES), _end_all),
                    "raw": Life(by_hand.fork, by_hand.end_all),
                },
                count,
            )
    return [
        row_of(f"{kind}-move", titles, moves, raw_titles[0]),
        row_of(f"{kind}-fork", titles, forks, raw_titles[1]),
    ]


def _end_all(environments: list[hermitcrab.Environment]) -> None:
    for each in environments:
        each.cleanup()


@contextmanager
def _project() -> Iterator[Path]:
    """Files to carry."""
    with scratch() as directory:
        project = directory / "project"
        project.mkdir()
        _run(f"cd {project} && {_FILL}")
        yield project


class _Directories:
    """The files alone, without a sandbox around them."""

    def __init__(self, project: Path) -> None:
        self._project = project

    def move(self) -> Path:
        place = self._place()
        _run(f"mkdir {place}; tar -C {self._project} -c . | tar -C {place} -x")
        return place

    def fork(self) -> list[Path]:
        places = [self._place() for _ in range(_COPIES)]
        _run(" & ".join(f"cp -a {self._project} {place}" for place in places) + "; wait")
        return places

    def end(self, place: Path) -> None:
        _run(f"rm -r {place}")

    def end_all(self, places: list[Path]) -> None:
        _run(f"rm -r {' '.join(map(str, places))}")

    def _place(self) -> Path:
        return self._project.with_name(secrets.token_hex(4))


class _Containers:
    """Containers with their workspace in memory, as ours have it, by the engine's own commands."""

    def __init__(self, image: str, project: Path) -> None:
        self._image = image
        self._project = project
        self._name = self.move()

    def __enter__(self) -> _Containers:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(self._name)

    def move(self) -> str:
        name = _name()
        _run(f"{_start(name, self._image)}; tar -C {self._project} -c . | {_unpack(name)}")
        return name

    def fork(self) -> list[str]:
        image, names = f"hermitcrab-bench:{secrets.token_hex(4)}", [_name() for _ in range(_COPIES)]
        sent = f"docker exec {self._name} tar -C /workspace -c ."
        copies = " & ".join(f"({_start(name, image)}; {sent} | {_unpack(name)})" for name in names)
        _run(f"docker commit {self._name} {image}; {copies} & wait")
        return [*names, image]

    def end(self, name: str) -> None:
        _run(f"docker rm --force {name}")

    def end_all(self, made: list[str]) -> None:
        *names, image = made
        _run(f"docker rm --force {' '.join(names)}; docker rmi {image}")


def _name() -> str:
    return f"hermitcrab-bench-{secrets.token_hex(6)}"


def _start(name: str, image: str) -> str:
    return f"docker run --detach --rm --name {name} --tmpfs /workspace:exec --entrypoint sleep {image} 3600"


def _unpack(name: str) -> str:
    return f"docker exec -i {name} tar -C /workspace -x"


def _run(line: str) -> None:
    subprocess.run(["bash", "-c", line], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
