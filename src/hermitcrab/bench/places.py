"""Containers and hosts: a command in them beside the engine's own `exec`, and what it takes to get one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import hermitcrab
from hermitcrab.bench.beside import Rows, given, opened, ratio_of, row_of, unless_missing
from hermitcrab.bench.raw_places import Apptainer, Container, RawPlace, SharedConnection, log_in_once
from hermitcrab.bench.rows import Row, at_least, at_most, row_to_json, times_faster
from hermitcrab.bench.stats import scaled, summarize
from hermitcrab.bench.timing import SETTLE, Life, all_open, interleaved, lives, swarm

COMMANDS = 100
CROWD, CROWD_COMMANDS, CROWD_ROUNDS = 32, 20, 5
RAW_CROWD_COMMANDS = 3
"""Of each caller: a rate needs no more of them, and they are slow."""
_STARTS = 15
_AT_ONCE = 8
_COMMAND = 'execute("true")'
_DOCKER_TITLES = {
    "docker-true": f"docker: {_COMMAND}",
    "docker-start": f"docker: open, first {_COMMAND}",
    "docker-cleanup": "docker: clean it up",
}
_SSH_TITLES = {"ssh-true": f"ssh: {_COMMAND}", "ssh-start": f"ssh: open, first {_COMMAND}"}


def docker(scale: float, image: str | None) -> Rows:
    """A container: a command in it, getting it, and getting rid of it."""
    return unless_missing(_DOCKER_TITLES, lambda: _docker(scale, given(image, "--image IMAGE")))


def _docker(scale: float, image: str) -> Rows:
    with opened("docker", image=image) as env:
        true = _commands(env, lambda: Container("docker", image), scale)

    def begin() -> hermitcrab.Environment:
        return used_once(hermitcrab.open("docker", image=image))

    def begin_raw() -> Container:
        container = Container("docker", image)
        container.true()
        return container

    begins, ends = lives(
        {
            "ours": Life(begin, hermitcrab.Environment.cleanup),
            "raw": Life(begin_raw, Container.close),
        },
        scaled(_STARTS, scale),
    )
    titles, faster, soon = _DOCKER_TITLES, times_faster(ratio_of(true), 25), at_most(ratio_of(begins), 1.2)
    return [
        row_of("docker-true", titles, true, "docker exec NAME true", faster),
        row_of("docker-start", titles, begins, "docker run -d, docker exec NAME true", soon),
        row_of("docker-cleanup", titles, ends, "docker rm -f NAME"),
    ]


def docker_crowd(scale: float, image: str | None) -> Rows:
    """32 containers, each used by a thread of its own, all at once."""
    callers, commands = scaled(CROWD, min(1.0, scale * 4)), scaled(CROWD_COMMANDS, min(1.0, scale * 4))
    titles = {"docker-crowd": f"docker: {callers} containers x {commands} commands at once"}
    return unless_missing(
        titles,
        lambda: _docker_crowd(scale, given(image, "--image IMAGE"), callers, commands, titles),
        "commands/s",
    )


def _docker_crowd(scale: float, image: str, callers: int, commands: int, titles: Mapping[str, str]) -> Rows:
    opened("docker", image=image).cleanup()
    rates: dict[str, list[float]] = {"ours": [], "raw": []}
    with (
        all_open(
            lambda: hermitcrab.open("docker", image=image),
            hermitcrab.Environment.cleanup,
            callers,
            at_once=_AT_ONCE,
        ) as environments,
        all_open(
            lambda: Container("docker", image), Container.close, callers, at_once=_AT_ONCE
        ) as containers,
    ):
        ours = [lambda env=env: env.execute("true").check() for env in environments]
        swarm(ours, 1)
        for _ in range(scaled(CROWD_ROUNDS, scale)):
            time.sleep(SETTLE * 10)
            rates["ours"].append(callers * commands / swarm(ours, commands))
            time.sleep(SETTLE * 10)
            taken = swarm([each.true for each in containers], RAW_CROWD_COMMANDS)
            rates["raw"].append(callers * RAW_CROWD_COMMANDS / taken)
    found = {name: summarize(each, higher_is_better=True) for name, each in rates.items()}
    row = Row(
        name="docker-crowd",
        title=titles["docker-crowd"],
        unit="commands/s",
        ours=found["ours"],
        raw=found["raw"],
        raw_title=f"docker exec from {callers} threads, each into a container of its own",
        higher_is_better=True,
        goals=(at_least(found["ours"].median, 300, "commands/s"),),
    )
    return [row_to_json(row)]


def podman(scale: float, image: str | None) -> Rows:
    return _engine_true("podman", scale, image, engine="podman")


def gvisor(scale: float, image: str | None) -> Rows:
    return _engine_true("gvisor", scale, image, engine="docker", runtime="runsc")


def _engine_true(name: str, scale: float, image: str | None, *, engine: str, runtime: str = "") -> Rows:
    titles = {f"{name}-true": f"{name}: {_COMMAND}"}
    flags = ["--runtime", runtime] if runtime else []

    def measure() -> Rows:
        chosen = given(image, "--image IMAGE")
        with opened(engine, image=chosen, **({"runtime": runtime} if runtime else {})) as env:
            samples = _commands(env, lambda: Container(engine, chosen, *flags), scale)
        return [row_of(f"{name}-true", titles, samples, f"{engine} exec NAME true")]

    return unless_missing(titles, measure)


def apptainer(scale: float, apptainer_image: str | None) -> Rows:
    titles = {"apptainer-true": f"apptainer: {_COMMAND}"}

    def measure() -> Rows:
        image = given(apptainer_image, "--apptainer-image PATH")
        with opened("apptainer", image=image) as env:
            samples = _commands(env, lambda: Apptainer(image), scale)
        return [row_of("apptainer-true", titles, samples, "apptainer exec IMAGE true")]

    return unless_missing(titles, measure)


def ssh(scale: float, ssh: str | None, ssh_config: str | None) -> Rows:
    """A host: a command on it, and logging in."""

    def measure() -> Rows:
        host = given(ssh, "--ssh HOST")
        settings: dict[str, Any] = {"host": host, **({"config_file": ssh_config} if ssh_config else {})}
        with opened("ssh", **settings) as env:
            true = _commands(env, lambda: SharedConnection(host, ssh_config), scale)
        begins, _ = lives(
            {
                "ours": Life(
                    lambda: used_once(hermitcrab.open("ssh", **settings)), hermitcrab.Environment.cleanup
                ),
                "raw": Life(lambda: log_in_once(host, ssh_config)),
            },
            scaled(_STARTS, scale),
        )
        over_master = "ssh HOST true over a ControlMaster"
        return [
            row_of("ssh-true", _SSH_TITLES, true, over_master, times_faster(ratio_of(true), 4)),
            row_of("ssh-start", _SSH_TITLES, begins, "ssh HOST true over a connection of its own"),
        ]

    return unless_missing(_SSH_TITLES, measure)


def used_once(env: hermitcrab.Environment) -> hermitcrab.Environment:
    env.execute("true").check()
    return env


def _commands(
    env: hermitcrab.Environment, open_raw: Callable[[], RawPlace], scale: float
) -> dict[str, list[float]]:
    with closing(open_raw()) as place:
        return interleaved(
            {"ours": lambda: env.execute("true").check(), "raw": place.true}, scaled(COMMANDS, scale)
        )
