"""Driving peers with their own Python, through their public API, each at its best.

A driver is a module with `VARIANTS`: ways to use the peer, each a function that opens a `Shell`. `DOCKER` and
`SSH`, where a driver has them, are the same in a container of an image and on a host with its ssh config.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Any

from hermitcrab.bench.peer_drivers import places
from hermitcrab.bench.peer_drivers.measuring import Open, Shell, local_rows
from hermitcrab.bench.rows import row_to_json


def measure(
    peer: str,
    scale: float,
    image: str | None = None,
    ssh: str | None = None,
    ssh_config: str | None = None,
) -> list[dict[str, Any]]:
    driver = import_module(f"{__name__}.{peer.replace('-', '_')}")
    version = metadata.version(peer)
    variants: dict[str, Open] = driver.VARIANTS
    in_docker: dict[str, Callable[[str], Shell]] = getattr(driver, "DOCKER", {}) if image else {}
    over_ssh: dict[str, Callable[[str, str | None], Shell]] = getattr(driver, "SSH", {}) if ssh else {}

    def who(variant: str) -> str:
        return " ".join(filter(None, (peer, version, variant)))

    rows = [row for name, open_here in variants.items() for row in local_rows(who(name), open_here, scale)]
    for name, open_in in in_docker.items():
        rows += places.docker_rows(who(name), partial(open_in, str(image)), str(image), scale)
    for name, open_on in over_ssh.items():
        open_shell = partial(open_on, str(ssh), ssh_config)
        rows += places.ssh_rows(who(name), open_shell, str(ssh), ssh_config, scale)
    return [row_to_json(row) for row in rows]
