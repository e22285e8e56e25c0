"""The settings of a sandbox at Vercel."""

from __future__ import annotations

from dataclasses import dataclass, field

from hermitcrab.backends.clouds.life import LEAST
from hermitcrab.backends.given import wrong

NAME = "vercel"
MEMORY_PER_CPU = 2048
"""MiB. Vercel sells them together."""
MOST_CPUS = 32
"""Of the largest plan; what a plan does not have Vercel refuses itself."""
RUNTIMES = {
    "universal": "vercel/sandbox/universal",
    "ubuntu": "vercel/sandbox/ubuntu",
    "node22": "vercel/sandbox/node:22",
    "node24": "vercel/sandbox/node:24",
    "node26": "vercel/sandbox/node:26",
    "python3.14": "vercel/sandbox/python:3.14",
}
"""Short names of the images that Vercel maintains; what it once called runtimes."""


@dataclass(frozen=True, kw_only=True)
class VercelConfig:
    """One sandbox at Vercel."""

    image: str = ""
    """An image of Vercel's registry. Empty: Vercel's own, with Node.js, Python and common tools."""
    runtime: str = ""
    """In place of an image: `node24`, `python3.14` and the like."""
    cpu: float | None = field(default=None, metadata={"above": 0})
    """Whole vCPUs, 1 or an even number. None leaves it to Vercel, which gives 2."""
    memory: int | None = field(default=None, metadata={"at_least": 1})
    """MiB: 2048 for each vCPU, no more and no less. None: what the vCPUs come with."""
    disk: int | None = None
    """Refused: Vercel knows no limit of the disk."""
    network: bool = True
    """False: the sandbox reaches nothing."""
    persistent_filesystem: bool = False
    """Keep its files, in a snapshot at Vercel, for the next one of this task."""
    task_id: str = ""
    """What it is for: `detach()` leaves it to the next program of its task, and a persistent one goes on
    where the last one ended."""
    max_lifetime: float = field(default=LEAST, metadata={"at_least": LEAST})
    """Seconds that it goes on at Vercel without a sign of life from here. Extended while it is open."""
    start_timeout: float = field(default=120.0, metadata={"above": 0})
    """Seconds for it to come up."""


@dataclass(frozen=True, kw_only=True)
class RestoredConfig(VercelConfig):
    """One that begins as a snapshot."""

    snapshot: str = ""


def refuse(config: VercelConfig) -> None:
    """What the types let through, as an error before anything starts."""
    if config.disk is not None:
        raise wrong("disk", config.disk, "takes nothing: Vercel knows no limit of the disk", backend=NAME)
    if config.runtime and config.image:
        raise wrong("runtime", config.runtime, "takes nothing where an image is given", backend=NAME)
    if config.runtime and config.runtime not in RUNTIMES:
        raise wrong("runtime", config.runtime, f"takes {', '.join(RUNTIMES)}", backend=NAME)
    vcpus(config)


def image(config: VercelConfig) -> str | None:
    """None where Vercel chooses, or a snapshot says what there is."""
    if isinstance(config, RestoredConfig) and config.snapshot:
        return None
    return config.image or RUNTIMES.get(config.runtime)


def vcpus(config: VercelConfig) -> int | None:
    """How many to ask for. An error for what Vercel would refuse or round."""
    if config.cpu is not None and not _is_sold(config.cpu):
        raise wrong(
            "cpu",
            f"{config.cpu:g}",
            f"takes whole vCPUs: 1, or an even number up to {MOST_CPUS}",
            backend=NAME,
        )
    if config.memory is None:
        return None if config.cpu is None else int(config.cpu)
    cpus = config.memory / MEMORY_PER_CPU
    if config.cpu not in (None, cpus):
        comes_with = int(config.cpu or 0) * MEMORY_PER_CPU
        raise wrong(
            "memory",
            config.memory,
            f"takes {comes_with} with cpu={config.cpu:g}, {MEMORY_PER_CPU} MiB for each vCPU; "
            "or leave one of the two out",
            backend=NAME,
        )
    if not _is_sold(cpus):
        raise wrong(
            "memory",
            config.memory,
            f"takes {MEMORY_PER_CPU} MiB for each vCPU, of which there can be 1 or an even number: "
            f"{_enough(cpus) * MEMORY_PER_CPU}, for example",
            backend=NAME,
        )
    return int(cpus)


def _is_sold(cpus: float) -> bool:
    return cpus == 1 or (cpus % 2 == 0 and 0 < cpus <= MOST_CPUS)


def _enough(cpus: float) -> int:
    """The fewest that are at least so many."""
    return next((each for each in range(1, MOST_CPUS + 1) if each >= cpus and _is_sold(each)), MOST_CPUS)
