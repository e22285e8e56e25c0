"""Snapshots of containers: an image of the container's own layer. What is in memory goes into an archive."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hermitcrab.backends.archived import kept_task, within
from hermitcrab.backends.data import data_directory
from hermitcrab.backends.docker import owners
from hermitcrab.backends.docker.config import DockerConfig, RestoredConfig
from hermitcrab.backends.docker.engine import NO_IMAGE, Engine
from hermitcrab.backends.docker.engine_text import Kind
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.protocols import Tree
from hermitcrab.errors import SandboxStartError

REPOSITORY = "hermitcrab-snapshot"
LABEL = "hermitcrab.snapshot"
_PATIENCE = 1800.0
"""Seconds: a layer may be large."""
_MOST_LAYERS = 100
"""Engines stack 128 at most; a task that is kept again and again adds one each time."""
_NOT_CARRIED = ("/dev", "/proc", "/run", "/sys")
"""As after a reboot."""
_INHERITED = (owners.TASK, owners.USER, owners.FINGERPRINT, owners.TOKEN, owners.LACKS, owners.OWNER)
"""Labels that are a container's alone. An image hands all of its own down."""


@dataclass(frozen=True)
class ContainerSnapshots:
    """The capability, for one engine."""

    kind: Kind

    def task(self, config: DockerConfig) -> str:
        return kept_task(config)

    def reference(self, id: str) -> str:
        return f"{REPOSITORY}:{id}"

    async def save(self, sandbox: AgentSandbox, config: DockerConfig, id: str) -> str:
        return await asyncio.to_thread(_saved, Engine.find(self.kind), sandbox.name, config, id)

    async def trees(self, sandbox: AgentSandbox, config: DockerConfig) -> Sequence[Tree]:
        described = await asyncio.to_thread(_inspected, Engine.find(self.kind), sandbox.name)
        return trees_in(described, kept=data_directory(os.environ) / self.kind.name)

    async def layer(self, sandbox: AgentSandbox, config: DockerConfig) -> None:
        return None

    def applied(self, config: DockerConfig, native: str) -> RestoredConfig:
        return RestoredConfig(**vars(config), snapshot=native)

    def available(self, native: str) -> bool:
        return bool(_image(Engine.find(self.kind), native))

    def remove(self, native: str) -> bool:
        try:
            Engine.find(self.kind).ask("image", "rm", native, patience=_PATIENCE)
        except SandboxStartError as error:
            if not re.search(NO_IMAGE, str(error)):
                raise
            return False
        return True


def trees_in(described: Mapping[str, Any], *, kept: Path) -> list[Tree]:
    """The directories of a container that are in no layer and yet its own, as `inspect` describes it.

    `kept` is where we keep what is persistent; other host directories are the user's.
    """
    mounts = described.get("Mounts") or []
    ours = {each["Destination"] for each in mounts if _is_ours(each, kept)}
    foreign = {each["Destination"] for each in mounts if each["Type"] == "bind"} - ours
    volumes = {each["Destination"] for each in mounts if each["Type"] == "volume"}
    own = sorted(set((described.get("HostConfig") or {}).get("Tmpfs") or {}) | volumes | ours)
    return [
        Tree(path, exclude=tuple(sorted(_inside(foreign, path))), kept=path in ours)
        for path in own
        if path not in foreign
        and not any(path == each or within(path, each) for each in _NOT_CARRIED)
        and not any(within(path, each) for each in own)
    ]


def _inside(paths: Iterable[str], directory: str) -> Iterator[str]:
    return filter(None, (within(path, directory) for path in paths))


def commit_changes(id: str, user: str) -> list[str]:
    """What the image says besides its files: nothing of the container that it was."""
    labels = {**dict.fromkeys(_INHERITED, ""), LABEL: id}
    lines = [f'LABEL {name}="{value}"' for name, value in labels.items()]
    return [*lines, f"USER {user or '0'}", "ENTRYPOINT []", 'CMD ["bash"]']


def _is_ours(mount: Mapping[str, Any], kept: Path) -> bool:
    return mount["Type"] == "bind" and Path(mount["Source"]).is_relative_to(kept.resolve())


def _saved(engine: Engine, container: str, config: DockerConfig, id: str) -> str:
    """Always an image of its own: whether anything changed takes the engine longer to say than to keep it."""
    reference = f"{REPOSITORY}:{id}"
    base = _image(engine, _inspected(engine, container)["Image"])
    settings = engine.image(config.image, pull="missing", platform=config.platform)
    changes = commit_changes(id, settings.user)
    if config.read_only:
        engine.ask("tag", base["Id"], reference)
    elif len((base.get("RootFS") or {}).get("Layers") or []) < _MOST_LAYERS:
        engine.ask("commit", *_each("--change", changes), container, reference, patience=_PATIENCE)
    else:
        _flatten(engine, container, reference, [*_variables(base), *changes])
    return reference


def _flatten(engine: Engine, container: str, reference: str, changes: Sequence[str]) -> None:
    """All of its files as one layer."""
    words = [engine.path, "import", *_each("--change", changes), "-", reference]
    with subprocess.Popen([engine.path, "export", container], stdout=subprocess.PIPE) as export:
        done = subprocess.run(words, stdin=export.stdout, capture_output=True, check=False)
    if done.returncode or export.returncode:
        raise engine.understood(done.stderr.decode(errors="replace"))


def _variables(image: Mapping[str, Any]) -> Iterator[str]:
    for each in image["Config"].get("Env") or []:
        name, _, value = each.partition("=")
        yield f"ENV {name}={json.dumps(value)}"


def _inspected(engine: Engine, container: str) -> dict[str, Any]:
    (described,) = json.loads(engine.ask("container", "inspect", container))
    return dict(described)


def _image(engine: Engine, reference: str) -> dict[str, Any]:
    """What the engine says of an image; nothing when it has none."""
    try:
        (described,) = json.loads(engine.ask("image", "inspect", reference))
    except SandboxStartError as error:
        if re.search(NO_IMAGE, str(error)):
            return {}
        raise
    return dict(described)


def _each(flag: str, values: Iterable[str]) -> Iterator[str]:
    return (word for value in values for word in (flag, value))
