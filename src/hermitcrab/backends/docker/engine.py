"""The command lines of Docker and Podman: found, asked, and understood when they refuse."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from hermitcrab.backends.docker.engine_text import DOCKER, Kind, hint, home_in, machine, person, plain, warned
from hermitcrab.backends.docker.flags import Image, Person
from hermitcrab.backends.docker.owners import OWNER, Found, this_owner
from hermitcrab.backends.progress import run_shown
from hermitcrab.errors import BackendUnavailable, HermitcrabWarning, SandboxStartError

PATIENCE = 5.0
"""Seconds that an engine has to answer a question."""
_REMOVAL_PATIENCE = 30.0
_KNOWN_FOR = 30.0
"""Seconds that an image, once seen, is taken to be there. A wrong belief costs one failed `run`."""
_ADDRESSES = (
    "DOCKER_HOST",
    "DOCKER_CONTEXT",
    "DOCKER_CONFIG",
    "CONTAINER_HOST",
    "CONTAINERS_CONF",
    "CONTAINERS_STORAGE_CONF",
    "XDG_RUNTIME_DIR",
    "HOME",
)
"""Variables that lead the same program to another engine."""
_log = logging.getLogger(__name__)

_NO_CONTAINER = r"[Nn]o such container|no container with name|already in progress"
NO_IMAGE = r"[Nn]o such image|image not known|failed to find image"


class Answer(NamedTuple):
    """What an engine said."""

    output: str
    warnings: list[str]


@dataclass(eq=False)
class Engine:
    """An engine's program on this machine. Methods wait for it; call them from a thread."""

    kind: Kind
    path: str
    refuses: set[str] = field(default_factory=set)
    """Settings that it turned down; they are not tried again."""
    swept: bool = False
    """Orphans were looked for."""
    _images: dict[tuple[str, str], tuple[float, Image]] = field(default_factory=dict)
    _people: dict[tuple[str, str], Person | None] = field(default_factory=dict)

    @classmethod
    def find(cls, kind: Kind) -> Engine:
        """The engine, with what this program learned of it before."""
        places = map(os.path.expanduser, kind.places)
        path = shutil.which(kind.name) or next((each for each in places if os.access(each, os.X_OK)), None)
        if path is None:
            raise BackendUnavailable(
                f"{kind.name} was not found on PATH.", hint=kind.install, backend=kind.name
            )
        return _engine(kind, path, tuple(os.environ.get(name, "") for name in _ADDRESSES))

    def ask(self, *words: str, patience: float = PATIENCE) -> str:
        """What the engine answers. BackendUnavailable when nobody does, SandboxStartError when it refuses."""
        return self.tell(*words, patience=patience).output

    def tell(self, *words: str, patience: float = PATIENCE) -> Answer:
        """As `ask`, with what the engine warns of."""
        try:
            done = subprocess.run(
                [self.path, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=patience,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._unavailable(f"{self.kind.service} did not answer within {patience:g} s.") from None
        except OSError as error:
            raise self._unavailable(f"{self.path} cannot be run: {error}.", self.kind.install) from error
        if done.returncode != 0:
            raise self.understood(done.stderr.decode(errors="replace"))
        return Answer(done.stdout.decode(errors="replace"), warned(done.stderr.decode(errors="replace")))

    def understood(self, message: str) -> BackendUnavailable | SandboxStartError:
        """An engine's complaint as the error that it means."""
        text = plain(message)
        todo = hint(text)
        if todo is not None:
            return self._unavailable(text + ("" if text.endswith((".", "?")) else "."), todo)
        return SandboxStartError(text or f"{self.kind.name} failed", backend=self.kind.name)

    def version(self) -> str:
        """The engine's version, which it only knows when it answers."""
        server = "{{.Server.Version}}" if self.kind is DOCKER else "{{.Client.Version}}"
        return self.ask("version", "--format", server).strip()

    def image(self, reference: str, *, pull: str = "missing", platform: str = "") -> Image:
        """The image, pulled first where the policy says so."""
        seen = self._images.get((reference, platform))
        if seen is not None and pull != "always" and time.monotonic() - seen[0] < _KNOWN_FOR:
            return seen[1]
        image = None if pull == "always" else self._look(reference)
        if image is None:
            if pull == "never":
                raise self._no_image(reference, "it is not there, and pull is never; build or pull it first")
            self._pull(reference, platform)
            image = self._look(reference)
        if image is None:
            raise self._no_image(reference, "it was pulled and is not there")
        self._images[reference, platform] = (time.monotonic(), image)
        return image

    def person(self, image: Image, name: str) -> Person | None:
        """A user of the image, as its own list has it. Nothing of the image is run for that."""
        if (image.id, name) not in self._people:
            words = ("--label", f"{OWNER}={this_owner()}", "--entrypoint", "none", image.id, "none")
            container = self.ask("create", "--pull", "never", *words).strip()
            try:
                listed = self.ask("cp", f"{container}:/etc/passwd", "-")
            except SandboxStartError:
                listed = ""
            finally:
                self.remove([container])
            self._people[image.id, name] = person(listed, name)
        return self._people[image.id, name]

    def forget(self, reference: str, platform: str = "") -> bool:
        """Look again next time. Whether there was anything to forget."""
        return self._images.pop((reference, platform), None) is not None

    def containers(self, **labels: str) -> list[Found]:
        """Ours, of any owner; those with all of these labels."""
        wanted = [f"label={OWNER}", *(f"label={name}={value}" for name, value in labels.items())]
        filters = [word for each in wanted for word in ("--filter", each)]
        names = self.ask("ps", "--all", "--quiet", "--no-trunc", *filters).split()
        if not names:
            return []
        try:
            return [_found(each) for each in json.loads(self.ask("container", "inspect", *names))]
        except SandboxStartError:
            # One of them ended between the two questions; each for itself then.
            return [each for name in names for each in self._inspected(name)]

    def remove(self, names: Iterable[str]) -> list[str]:
        """End and remove them; which of them are gone."""
        gone = []
        for name in names:
            try:
                self.ask("rm", "--force", "--volumes", name, patience=_REMOVAL_PATIENCE)
            except SandboxStartError as error:
                if not re.search(_NO_CONTAINER, str(error)):
                    _log.warning("%s cannot remove %s: %s", self.kind.name, name, error)
                    continue
            gone.append(name)
        return gone

    def _inspected(self, name: str) -> list[Found]:
        try:
            return [_found(each) for each in json.loads(self.ask("container", "inspect", name))]
        except SandboxStartError:
            return []

    def _look(self, reference: str) -> Image | None:
        try:
            (described,) = json.loads(self.ask("image", "inspect", reference))
        except SandboxStartError as error:
            if re.search(NO_IMAGE, str(error)):
                return None
            raise
        settings = described.get("Config") or {}
        return Image(
            id=described["Id"],
            machine=machine(described.get("Architecture", "")),
            user=settings.get("User") or "",
            directory=settings.get("WorkingDir") or "",
            home=home_in(settings.get("Env") or []),
        )

    def _pull(self, reference: str, platform: str) -> None:
        words = [self.path, "pull", *(["--platform", platform] if platform else []), reference]
        _log.info("pulling %s", reference)
        status, said = run_shown(words, _log)
        if status != 0:
            error = self.understood(said)
            if isinstance(error, BackendUnavailable):
                raise error
            raise self._no_image(reference, f"it is not there and cannot be pulled: {error}")

    def _no_image(self, reference: str, why: str) -> SandboxStartError:
        return SandboxStartError(f"image {reference!r}: {why}", backend=self.kind.name)

    def _unavailable(self, message: str, hint: str = "") -> BackendUnavailable:
        return BackendUnavailable(message, hint=hint or self.kind.begin, backend=self.kind.name)


@cache
def _engine(kind: Kind, path: str, _addresses: tuple[str, ...]) -> Engine:
    return Engine(kind, path)


def _found(described: Mapping[str, Any]) -> Found:
    settings = described.get("Config") or {}
    return Found(
        name=described["Name"].removeprefix("/"),
        image=settings.get("Image") or described.get("ImageName") or "",
        state=(described.get("State") or {}).get("Status", ""),
        created=described.get("Created", ""),
        labels=settings.get("Labels") or {},
    )


def warn(kind: Kind, message: str) -> None:
    warnings.warn(f"{kind.name}: {message}", HermitcrabWarning, stacklevel=3)
