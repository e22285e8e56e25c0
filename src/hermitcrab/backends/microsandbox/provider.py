"""microsandbox as `clouds.provider` wants a provider, though its VMs are on this machine."""

from __future__ import annotations

import asyncio
import json
import secrets
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module

from hermitcrab.backends.clouds import owned
from hermitcrab.backends.clouds.provider import Rented, Running
from hermitcrab.backends.clouds.retry import Failure
from hermitcrab.backends.microsandbox import failures, preflight
from hermitcrab.backends.microsandbox.command import Msb, complaint
from hermitcrab.backends.microsandbox.config import (
    MicrosandboxConfig,
    RestoredConfig,
    mounts,
    refuse_other,
    settings,
    vm_name,
)
from hermitcrab.backends.microsandbox.engine import RUNNING, SETTINGS, Engine, Hear, Order, Vm
from hermitcrab.backends.microsandbox.failures import INSTALL, NAME, TAKEN
from hermitcrab.backends.microsandbox.sdk import Sdk
from hermitcrab.core.protocols import Health
from hermitcrab.errors import BackendUnavailable


def find_engine() -> Engine:
    """The SDK, or else the command."""
    try:
        import_module(Sdk.module)
    except ImportError:
        return Msb()
    return Sdk()


class Machine:
    """A VM."""

    notes: Sequence[str] = ()

    def __init__(self, engine: Engine, name: str, *, lasts: bool) -> None:
        self.id = name
        self._engine = engine
        self._lasts = lasts

    async def run(self, script: str, *, out: Hear, err: Hear) -> Running:
        return await self._engine.run(self.id, script, out, err)

    async def extend(self, seconds: int) -> None:
        # How long it may be idle was said when it was made; that begins anew.
        await self._engine.touch(self.id)

    async def end(self) -> None:
        await (self._engine.stop(self.id) if self._lasts else self._engine.remove(self.id))


class Microsandbox:
    """The VMs and snapshots on this machine."""

    name, title = NAME, "microsandbox"
    text = False
    stays = lasting = True
    names = False

    def __init__(self, find: Callable[[], Engine] = find_engine) -> None:
        self.joined = False
        """The VM of the last `create` was there before."""
        self._find = find

    @property
    def module(self) -> str:
        return self._engine.module

    @property
    def _engine(self) -> Engine:
        return self._find()

    def absent(self) -> str:
        """Why there is no microsandbox here; empty when there is."""
        try:
            there = self._engine.msb
        except Exception as error:  # the SDK without its programs, or with half of them
            return str(failures.understood(error).error).removesuffix(INSTALL).rstrip(". ")
        return "" if there else "neither its Python package nor the command msb is installed"

    def missing(self) -> Health | None:
        if why := self.absent():
            return Health(False, why, INSTALL)
        return preflight.problem()

    async def greet(self) -> str:
        """What `msb doctor` says."""
        engine = self._engine
        msb = engine.msb
        doctor = await asyncio.create_subprocess_exec(msb, "doctor", stdin=DEVNULL, stdout=PIPE, stderr=PIPE)
        _, said = await doctor.communicate()
        if doctor.returncode != 0:
            _, _, wrong = said.decode(errors="replace").partition("error:")
            raise BackendUnavailable(f"{complaint(wrong)}.", hint="Run `msb doctor`.", backend=NAME)
        return f"{msb} runs VMs by /dev/kvm" + ("; without its SDK" if isinstance(engine, Msb) else "")

    async def create(
        self, config: MicrosandboxConfig, *, life: int, labels: Mapping[str, str], key: str
    ) -> Machine:
        name = vm_name(config, key)
        found = await self.again(config, name, life=life)
        self.joined = found is not None and bool(config.task)
        if found is not None:
            return found
        order = Order(name, config, mounts(config), _labels(config, labels), life)
        snapshot = config.snapshot if isinstance(config, RestoredConfig) else ""
        try:
            await (self._engine.restore(order, snapshot) if snapshot else self._engine.create(order))
        except Exception as error:
            if TAKEN not in str(error):
                with suppress(Exception):
                    await self._engine.remove(name)  # what does not boot is written down nevertheless
            raise
        return Machine(self._engine, name, lasts=config.persistent_filesystem)

    async def again(self, config: MicrosandboxConfig, id: str, *, life: int) -> Machine | None:
        vm = await self._engine.find(id)
        if vm is None:
            return None
        made_with = vm.labels.get(SETTINGS, "")
        refuse_other(config, id, made_with)
        await self._engine.wake(vm)
        return Machine(self._engine, id, lasts=bool(made_with))

    async def rented(self) -> list[Rented]:
        return [vm.rented for vm in await self._engine.every(owned.MARK)]

    async def end_task(self, task: str) -> bool:
        """Remove the VMs of a task. Whether there were any."""
        found = await self._engine.every({**owned.MARK, owned.TASK: task})
        for vm in found:
            await self._engine.remove(vm.name)
        return bool(found)

    async def remove(self, id: str) -> None:
        await self._engine.remove(id)

    async def why_lost(self, id: str) -> str:
        vm = await self._engine.find(id)
        if vm is None:
            return f"the VM {id} is gone: somebody removed it"
        return "" if vm.status == RUNNING else _fate(vm)

    async def keep(self, id: str, name: str) -> str:
        return await self._engine.keep(id, secrets.token_hex(8))

    async def kept(self, reference: str) -> bool:
        return await self._engine.kept(reference)

    async def forget(self, reference: str) -> bool:
        return await self._engine.forget(reference)

    def understood(self, error: Exception) -> Failure:
        return failures.understood(error)


def _fate(vm: Vm) -> str:
    if vm.status == "crashed":
        return f"the VM {vm.name} crashed: `msb logs --source system {vm.name}` tells more"
    return f"the VM {vm.name} is {vm.status}: somebody stopped it, or its max_duration was over"


def _labels(config: MicrosandboxConfig, labels: Mapping[str, str]) -> dict[str, str]:
    """A persistent VM is its task's, not this program's: it is nobody's orphan."""
    if not config.task:
        return dict(labels)
    lasting = {owned.TASK: config.task, SETTINGS: json.dumps(settings(config))}
    return {**{key: value for key, value in labels.items() if key != owned.OWNER}, **lasting}
