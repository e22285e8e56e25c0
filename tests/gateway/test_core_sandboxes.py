"""Sandboxes of a gateway, from their creation to their end."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from hermitcrab import snapshots
from hermitcrab.backends import registry
from hermitcrab.backends.served import read
from hermitcrab.errors import UnsupportedCapability
from hermitcrab.gateway.admission import TenantAdmission
from hermitcrab.gateway.core_settings import EngineSettings, PoolSettings
from hermitcrab.gateway.records import GatewayFault, SandboxRequest, SandboxState
from hermitcrab.gateway.settings import Limits
from hermitcrab.gateway.wire import Status
from tests.conftest import required
from tests.engines import IMAGE
from tests.gateway.core_parts import PATIENCE, TENANT, ended, gateway, ready, run, settings, started, until

needs_bubblewrap = pytest.mark.skipif(
    "bubblewrap" not in required() and not registry.get("bubblewrap").check().usable,
    reason="bubblewrap does not run here",
)
needs_docker = pytest.mark.skipif(
    "docker" not in required() and not registry.get("docker").check().usable,
    reason="Docker does not run here",
)


def test_the_same_key_gives_the_same_sandbox(tmp_path: Path) -> None:
    async def scenario() -> None:
        admission = TenantAdmission(lambda _: Limits(sandboxes=2, queue=0))
        async with gateway(settings(tmp_path), admission) as gate:
            asked = SandboxRequest(cwd="/")
            racing = await asyncio.gather(*(gate.create(TENANT, asked, "key") for _ in range(2)))
            again = await gate.create(TENANT, asked, "key")
            assert len({each.id for each in (*racing, again)}) == 1
            assert again.state is SandboxState.READY
            other = await gate.create("other", asked, "key")
            assert other.id != again.id, "a key is its tenant's"
            second = await gate.create(TENANT, asked)
            with pytest.raises(GatewayFault) as full:
                await gate.create(TENANT, asked)
            assert full.value.status == 429
            ended_ = await gate.terminate(TENANT, second.id)
            assert ended_.state is SandboxState.ENDED
            assert await gate.terminate(TENANT, second.id) == replace(ended_, used=ended_.used)
            third = await gate.create(TENANT, asked)
            assert third.state is SandboxState.READY
            with pytest.raises(GatewayFault, match="no more") as over:
                await run(gate, second.id, "true")
            assert (over.value.status, over.value.code) == (410, "sandbox_ended")

    asyncio.run(scenario())


def test_limits_end_a_sandbox_and_what_runs_in_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(settings(tmp_path)) as gate:
            idle = await ready(gate, idle_timeout_ms=300)
            busy = await ready(gate, idle_timeout_ms=300)
            short = await ready(gate, timeout_ms=700)
            sleeping = await started(gate, short.id, "echo on; sleep 1000")
            assert (await run(gate, busy.id, "sleep 1; echo done")).output == b"done\n"
            assert (await ended(gate, short.id, sleeping)).status == "cancelled"
            assert "nobody used it" in (await gate.sandbox(TENANT, idle.id)).reason

            await until(lambda: not gate._sandboxes.held)
            assert "its time was over" in (await gate.sandbox(TENANT, short.id)).reason
            assert "nobody used it" in (await gate.sandbox(TENANT, busy.id)).reason

    asyncio.run(scenario())


def test_a_sandbox_that_goes_away_is_lost_with_its_commands(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(settings(tmp_path)) as gate:
            box = (await ready(gate)).id
            id = await started(gate, box, "echo on; sleep 1000")
            assert (await anext(gate.follow(TENANT, box, id))).data == b"on\n"
            note = read("local", box)
            assert note is not None
            os.kill(gate._sandboxes.held[box].open.agent.host_pid, signal.SIGKILL)
            lost = await gate.exec(TENANT, box, id, PATIENCE)
            assert (lost.status, lost.returncode) == (Status.FAILED, None)
            assert "the sandbox was lost" in lost.reason
            await until(lambda: box not in gate._sandboxes.held)
            assert (await gate.sandbox(TENANT, box)).state is SandboxState.LOST
            await until(lambda: read("local", box) is None)
            await until(lambda: not Path(note.id).exists())
            assert (await gate.page(TENANT, box, id)).data == b"on\n", "what it said can still be read"

    asyncio.run(scenario())


@needs_bubblewrap
def test_files_go_on_under_a_logical_key_and_are_copied_by_a_fork(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(settings(tmp_path, "bubblewrap")) as gate:
            asked = {"persistent_filesystem": True, "logical_key": "project"}
            for turn in range(3):
                box = (await ready(gate, **asked)).id
                said = await run(
                    gate, box, f"cat log ~/log; echo {turn} | tee -a log >>~/log", cwd="/workspace"
                )
                expected = "".join(f"{each}\n" for each in range(turn)).encode() * 2
                assert said.output.replace(b"cat:", b"")[-len(expected) :] == expected or not turn
                await gate.terminate(TENANT, box, True)
            kept = await gate._ledger.latest_snapshot(TENANT, "project")
            assert kept is not None
            stored = [each.id for each in await asyncio.to_thread(snapshots.list_snapshots)]
            assert stored.count(kept.id) == 1
            box = (await ready(gate, **asked)).id
            copies = await gate.fork(TENANT, box, 2)
            assert {each.parent for each in copies} == {box}
            for number, copy in enumerate(copies):
                assert (
                    await run(gate, copy.id, f"echo {number} >own; cat log", cwd="/workspace")
                ).output == b"0\n1\n2\n"
            assert (await run(gate, box, "ls", cwd="/workspace")).output == b"log\n"
            kept_now = await gate.snapshot(TENANT, box)
            assert [each.id for each in await gate.snapshots(TENANT)] == [kept_now]
            await gate.terminate(TENANT, box, False)
            again = (await ready(gate, snapshot=kept_now)).id
            assert (await run(gate, again, "cat log", cwd="/workspace")).output == b"0\n1\n2\n"
            with pytest.raises(GatewayFault, match="no such snapshot"):
                await gate.create("other", SandboxRequest(snapshot=kept_now))
            with pytest.raises(GatewayFault, match="no such snapshot"):
                await gate.forget_snapshot("other", kept_now)
            await gate.forget_snapshot(TENANT, kept_now)
            assert await gate.snapshots(TENANT) == []
            assert kept_now not in [each.id for each in await asyncio.to_thread(snapshots.list_snapshots)]
            other = await gate.create("other", SandboxRequest(**asked))  # type: ignore[arg-type]
            assert other.state is SandboxState.READY
            files = await gate.files("other", other.id)
            assert [each.path for each in await files.list("/workspace")] == [], "a key is its tenant's"
            await asyncio.to_thread(snapshots.forget_snapshot, kept.id)

    asyncio.run(scenario())


def test_files_and_a_terminal(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(settings(tmp_path)) as gate:
            box = (await ready(gate)).id
            files = await gate.files(TENANT, box)
            await files.write(f"{tmp_path}/f", b"\0exact\xff")
            assert await files.read(f"{tmp_path}/f") == b"\0exact\xff"
            box = (await ready(gate, cwd=str(tmp_path), idle_timeout_ms=1000)).id
            shell = await gate.terminal(TENANT, box, 30, 90)
            await shell.write(b"stty size; pwd; cat\n")
            seen = b""
            async for data in shell.output():
                seen += data
                if str(tmp_path).encode() + b"\r\n" in seen:
                    break
            assert b"30 90" in seen
            await shell.resize(40, 100)
            use = await gate.use(TENANT, box)
            assert (use.processes or 0) >= 3
            assert (use.memory_bytes or 0) > 100_000
            await asyncio.sleep(1.3)  # longer than it may be idle
            assert (await gate.sandbox(TENANT, box)).state is SandboxState.READY, (
                "somebody is at its terminal"
            )
            await shell.kill()
            await shell.kill()
            assert await shell.wait() != 0
            with pytest.raises(UnsupportedCapability):
                await gate.set_network(TENANT, box, False)
            with pytest.raises(UnsupportedCapability):
                await gate.fork(TENANT, box)
            assert not any(each.parent for each in await gate.sandboxes(TENANT)), (
                "what cannot be is not tried"
            )

    asyncio.run(scenario())


def test_a_pool_hands_each_sandbox_out_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        core = settings(tmp_path, pools=(PoolSettings(engine="local", size=3),))
        async with gateway(core) as gate:
            await until(lambda: gate.statistics().pools[0].ready == 3)
            warm = set(gate._sandboxes.held)
            assert await gate.sandboxes() == [], "they are nobody's yet"
            asked = [gate.create(TENANT, SandboxRequest(memory_mib=100), f"{n % 4}") for n in range(8)]
            made = await asyncio.gather(*asked)
            assert len({each.id for each in made}) == 4
            assert warm <= {each.id for each in made}
            assert all([(await run(gate, each.id, "echo up")).output == b"up\n" for each in made])
            pool = gate.statistics().pools[0]
            assert (pool.handed_out, pool.missed >= 1) == (3, True)
            await until(lambda: gate.statistics().pools[0].ready == 3)
            waiting = next(each for each in gate._sandboxes.held.values() if not each.record.tenant)
            os.kill(waiting.open.agent.host_pid, signal.SIGKILL)
            await until(lambda: waiting.record.id not in gate._sandboxes.held)
            await until(lambda: gate.statistics().pools[0].ready == 3)
        assert not [each for each in registry.get("local").sandboxes() or [] if each.task in warm]  # type: ignore[misc]

    asyncio.run(scenario())


@needs_docker
def test_a_container_has_its_image_its_limits_and_its_network(tmp_path: Path) -> None:
    async def scenario() -> None:
        engines = {"c": EngineSettings(backend="docker", image=IMAGE, options={"pull": "never"})}
        async with gateway(settings(tmp_path, engines=engines)) as gate:
            box = (await ready(gate, image=IMAGE, cwd="/new/place", memory_mib=128)).id
            assert (await run(gate, box, "pwd; id -un")).output == b"/new/place\nroot\n"
            assert (await run(gate, box, "ls /sys/class/net")).output.split() == [b"eth0", b"lo"]
            await gate.set_network(TENANT, box, False)
            assert (await run(gate, box, "ls /sys/class/net")).output == b"lo\n"
            await gate.set_network(TENANT, box, True)
            assert len((await run(gate, box, "ls /sys/class/net")).output.split()) == 2
            use = await gate.use(TENANT, box)
            assert 0 < (use.memory_bytes or 0) < 128 << 20
            assert (use.cpu_seconds or 0) > 0
            with pytest.raises(GatewayFault, match="memory: ") as wrong:
                await ready(gate, image=IMAGE, memory_mib=1)
            assert wrong.value.status == 400

    asyncio.run(scenario())
