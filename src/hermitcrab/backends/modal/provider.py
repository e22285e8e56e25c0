"""Modal's sandboxes through its SDK, as `clouds.provider` wants them."""

from __future__ import annotations

import importlib.util
import os
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hermitcrab.backends.clouds import owned
from hermitcrab.backends.clouds.provider import Rented
from hermitcrab.backends.clouds.retry import Failure
from hermitcrab.backends.modal import failures, machine
from hermitcrab.backends.modal.config import LONGEST_LIFE, ModalConfig, RestoredConfig, rounded
from hermitcrab.backends.modal.failures import GET_TOKEN, NAME
from hermitcrab.backends.modal.machine import Left, Machine
from hermitcrab.backends.modal.tags import labels_of, tags_of
from hermitcrab.core.protocols import Health

# The SDK takes most of a second to import, and is not always there.
if TYPE_CHECKING:
    from modal import App, Image, Sandbox

APP = "hermitcrab"
"""What our sandboxes are part of, in Modal's words."""
STARTED, IMAGE = "hermitcrab.started", "hermitcrab.image"
"""Two more labels, for what Modal does not tell about a sandbox."""

_INSTALL = "Install its SDK: pip install 'hermitcrab[modal]'."
_CREDENTIALS = ("MODAL_TOKEN_ID", "MODAL_OAUTH_REFRESH_TOKEN", "MODAL_IS_REMOTE")
"""With one of these the SDK does not look for a token in its file."""
_ENDS = {
    0: "nothing ran in it for too long",
    124: "its time was over",
    137: "somebody ended it, or its memory ran out",
}


class Modal:
    """Modal's sandboxes and snapshots."""

    name, title, module = NAME, "Modal", "modal"
    text = stays = names = False

    def __init__(self) -> None:
        self._left: Left = {}

    def missing(self) -> Health | None:
        if importlib.util.find_spec(self.module) is None:
            return Health(False, "the Python package modal is not installed", _INSTALL)
        if any(map(os.environ.get, _CREDENTIALS)):
            return None
        return _missing_token(Path(os.environ.get("MODAL_CONFIG_PATH") or Path.home() / ".modal.toml"))

    async def greet(self) -> str:
        from modal import Client

        client = await Client.from_env.aio()
        await client.hello.aio()  # type: ignore[no-untyped-call]
        return "Modal takes the token"

    async def create(self, config: ModalConfig, *, life: int, labels: Mapping[str, str], key: str) -> Machine:
        kept = config.snapshot if isinstance(config, RestoredConfig) else ""
        return await self._made(config, kept or config.image, rounded(config), life=life, labels=labels)

    async def again(self, config: ModalConfig, id: str, *, life: int) -> Machine | None:
        """One whose time was over goes on, under another id, with the files that it left."""
        if sandbox := await _running(id):
            return Machine(sandbox, self._left, _started(await _labels(sandbox)))
        kept, taken = self._left.get(id, ("", 0.0))
        if not await self.kept(kept):
            return None
        note = f"the time of {id} was over; its files are those of {time.time() - taken:.0f} s ago"
        made = await self._made(config, kept, [note], life=life, labels=owned.labels(config.task_id))
        del self._left[id]
        return made

    async def _made(
        self, config: ModalConfig, made_from: str, notes: list[str], *, life: int, labels: Mapping[str, str]
    ) -> Machine:
        from modal import Sandbox

        now = int(time.time())
        sandbox = await Sandbox.create.aio(
            *("sleep", str(2 * LONGEST_LIFE)),
            app=await _app(create=True),
            image=_image(made_from),
            tags=tags_of({**labels, STARTED: str(now), IMAGE: made_from}),
            timeout=LONGEST_LIFE,
            idle_timeout=life,
            # What is reserved is the limit too: nothing is paid for that was not asked for.
            cpu=config.cpu and (config.cpu, config.cpu),
            memory=config.memory and (config.memory, config.memory),
            block_network=not config.network,
            region=config.region or None,
        )
        return Machine(sandbox, self._left, now, notes)

    async def rented(self) -> list[Rented]:
        from modal import Sandbox
        from modal.exception import NotFoundError

        try:
            app = await _app(create=False)
        except NotFoundError:
            return []
        found = []
        async for sandbox in Sandbox.list.aio(app_id=app.app_id, tags=dict(owned.MARK)):
            with suppress(NotFoundError):  # it may have ended meanwhile
                labels = await _labels(sandbox)
                found.append(Rented(sandbox.object_id, labels.get(IMAGE, ""), labels, _started(labels)))
        return found

    async def remove(self, id: str) -> None:
        if sandbox := await _running(id):
            await Machine(sandbox, self._left, 0).end()

    async def why_lost(self, id: str) -> str:
        from modal import Sandbox
        from modal.exception import NotFoundError

        try:
            status = (await Sandbox.from_id.aio(id)).returncode
        except NotFoundError:
            return f"the sandbox {id} is gone at Modal"
        if status is None:
            return ""
        return f"the sandbox {id} ended at Modal: {_ENDS.get(status, f'its status is {status}')}"

    async def keep(self, id: str, name: str) -> str:
        from modal import Sandbox

        sandbox = await Sandbox.from_id.aio(id)
        try:
            return await machine.snapshot(sandbox)
        finally:
            await machine.let_go(sandbox)

    async def kept(self, reference: str) -> bool:
        from modal import Image
        from modal.exception import NotFoundError

        if not reference:
            return False
        try:
            await Image.from_id(reference).build.aio(await _app(create=False))
        except NotFoundError:
            return False
        return True

    async def forget(self, reference: str) -> bool:
        return await machine.forget(reference)

    def understood(self, error: Exception) -> Failure:
        return failures.understood(error)


def _missing_token(settings: Path) -> Health | None:
    """What the SDK would find in its file. With one that it cannot read, it cannot even be imported."""
    try:
        profiles = tomllib.loads(settings.read_text(encoding="utf-8"))
    except FileNotFoundError:
        profiles = {}
    except (OSError, ValueError) as error:
        return Health(False, f"{settings} cannot be read: {error}", "Correct it, or run `modal token new`.")
    if any("token_id" in each for each in profiles.values() if isinstance(each, dict)):
        return None
    return Health(False, "there is no token for Modal", GET_TOKEN)


async def _app(*, create: bool) -> App:
    from modal import App

    return await App.lookup.aio(APP, create_if_missing=create)


def _image(name: str) -> Image:
    from modal import Image

    if not name:
        return Image.debian_slim()
    if name.startswith("im-"):
        return Image.from_id(name)
    # What an image would start by itself is not wanted here, and may end at once.
    return Image.from_registry(name, setup_dockerfile_commands=["ENTRYPOINT []"])


async def _running(id: str) -> Sandbox | None:
    from modal import Sandbox
    from modal.exception import NotFoundError

    try:
        sandbox = await Sandbox.from_id.aio(id)
    except NotFoundError:
        return None
    return sandbox if sandbox.returncode is None else None


async def _labels(sandbox: Sandbox) -> dict[str, str]:
    return labels_of(await sandbox.get_tags.aio())


def _started(labels: Mapping[str, str]) -> float:
    told = labels.get(STARTED, "")
    return float(told) if told.isdecimal() else time.time()
