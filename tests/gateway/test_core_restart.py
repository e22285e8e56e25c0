"""A gateway that is killed at any moment, and the next one that goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermitcrab.backends import registry
from hermitcrab.backends.served import end_task
from hermitcrab.gateway.database import DatabaseError, open_database
from hermitcrab.gateway.ledger import Ledger
from hermitcrab.gateway.records import ExecRecord, GatewayFault, SandboxRecord, SandboxRequest, SandboxState
from hermitcrab.gateway.service import Gateway, place
from hermitcrab.gateway.tables import MIGRATIONS
from hermitcrab.gateway.wire import Status
from tests.clouds.provided import emptied
from tests.clouds.running import Cloud
from tests.conftest import required
from tests.engines import IMAGE
from tests.gateway.core_parts import TENANT, Program, ended, gateway, ready, run, settings, until

WAITS = "echo before; until [ -e {0}/go ]; do sleep 0.02; done; echo after; echo x >>{0}/{1}"
LOUD = "yes | head -c 1000000; echo done"  # less than an agent keeps while nobody listens
CLOUDS = ("e2b", "modal")
LOUDER = "yes | head -c 4000000; until [ -e {0}/go ]; do sleep 0.02; done; echo done"


@pytest.fixture
def e2b(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with emptied("e2b", monkeypatch) as cloud:
        yield cloud


@pytest.fixture
def modal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with emptied("modal", monkeypatch) as cloud:
        yield cloud


@pytest.mark.parametrize("backend", ["local", "bubblewrap", "docker", "e2b", "modal"])
def test_after_a_kill_commands_go_on_and_results_are_told(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if backend in CLOUDS:
        request.getfixturevalue(backend)
    elif backend not in required() and not registry.get(backend).check().usable:
        pytest.skip(f"{backend} does not run here")
    inside = {"local": str(tmp_path), "bubblewrap": "/tmp"}.get(backend, "/tmp/inside")
    core = settings(tmp_path / "gateway", backend, IMAGE if backend == "docker" else "")
    commands = {
        "made": f"mkdir -p {inside}",
        "waits": WAITS.format(inside, "ran"),
        "loud": LOUD,
        "louder": LOUDER.format(inside),
        "ends": f"until [ -e {inside}/go ]; do sleep 0.02; done; echo last words; exit 7",
    }
    with Program(core, commands=commands, seen={"waits": "before", "loud": "y\ny\n"}) as program:
        box = program.line()
        assert program.line() == "started"

    async def scenario() -> None:
        async with gateway(core) as gate:
            assert (await gate.exec(TENANT, box, "waits")).status is Status.RUNNING
            assert await ended(gate, box, "loud") == ("completed", 0, b"y\n" * 500_000 + b"done\n")
            assert (await run(gate, box, f"touch {inside}/go")).returncode == 0
            assert await ended(gate, box, "waits") == ("completed", 0, b"before\nafter\n")
            louder = await ended(gate, box, "louder")
            assert (louder.status, louder.output[-8:]) == ("completed", b"\ny\ndone\n"[-8:])
            assert (await gate.exec(TENANT, box, "louder")).output_bytes == 4_000_005, "what is gone counts"
            assert await ended(gate, box, "ends") == ("completed", 7, b"last words\n")
            assert (await run(gate, box, f"cat {inside}/ran")).output == b"x\n", "it ran once"
            found = await gate.execs(TENANT, box)
            assert sum(each.status is Status.COMPLETED for each in found) == 7
            held = gate._sandboxes.held[box].open.agent
            assert held.joined
            assert held.resumed == {}

    asyncio.run(scenario())
    listed = registry.get(backend).sandboxes
    assert listed is not None
    assert box not in [each.task for each in listed()]


@pytest.mark.filterwarnings("ignore:e2b. the sandbox .* is gone")
def test_what_a_provider_lost_is_lost_and_not_replaced(e2b: Cloud, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(settings(tmp_path, "e2b")) as gate:
            record = await ready(gate)
            assert (await run(gate, record.id, "echo mine >/tmp/file")).returncode == 0
            e2b.vanish(e2b.box()["id"])
            await until(lambda: record.id not in gate._sandboxes.held)
            with pytest.raises(GatewayFault) as fault:
                await run(gate, record.id, "cat /tmp/file")
            assert (fault.value.status, fault.value.code) == (410, "sandbox_lost")
            assert e2b.boxes() == []

    asyncio.run(scenario())


def test_what_ended_while_no_gateway_ran_is_told_by_the_next(tmp_path: Path) -> None:
    core = settings(tmp_path / "gateway")
    command = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo bye; touch {tmp_path}/gone; exit 9"
    with Program(core, commands={"ends": command}) as program:
        box = program.line()
        assert program.line() == "started"

    async def scenario() -> None:
        (tmp_path / "go").touch()
        await until((tmp_path / "gone").exists)
        async with gateway(core) as gate:
            assert await ended(gate, box, "ends") == ("completed", 9, b"bye\n")

    asyncio.run(scenario())


def test_many_kills_lose_nothing_and_run_nothing_twice(tmp_path: Path) -> None:
    """Every command writes a line of its own; whatever is said of it must fit."""
    core, ran, asked, box = settings(tmp_path / "gateway"), tmp_path / "ran", set(), ""
    for turn in range(3):
        each = f"echo {{id}} >>{ran}; echo {{id}}"
        with Program(core, sandbox=box, crowd=8, round=turn, each=each) as program:
            box = program.line()
            assert program.line() == "started"
            asked |= {program.line() for _ in range(60 + 7 * turn)}

    async def scenario() -> None:
        async with gateway(core) as gate:
            found = {each.id: each for each in await gate.execs(TENANT, box)}
            said = {id: await ended(gate, box, id) for id in found}
            lines = ran.read_text().split()
            assert len(lines) == len(set(lines)), "nothing ran twice"
            completed = {id for id, each in said.items() if each.status == "completed"}
            assert completed <= set(lines)
            assert all(said[id].output.decode() == f"{id}\n" for id in completed)
            failed = said.keys() - completed
            assert all(said[id].status == "failed" for id in failed)
            assert len(completed) > 100
            assert not set(lines) - found.keys(), "nothing ran without a row"
            assert {id for id in asked if id not in found and id in lines} == set()

    asyncio.run(scenario())


def test_rows_that_nobody_stands_for_are_settled(tmp_path: Path) -> None:
    """A start that never reached the agent, a sandbox that was being made, one that is gone."""

    async def scenario() -> None:
        core, now = settings(tmp_path), time.time()
        gate = await Gateway.open(core)
        box = (await gate.create(TENANT, SandboxRequest())).id
        gone = (await gate.create(TENANT, SandboxRequest())).id
        await gate.close()
        assert end_task("local", gone)
        database = await open_database("", tmp_path, MIGRATIONS)
        ledger = Ledger(database, gate.node, place())
        half = SandboxRecord(
            id="half",
            tenant=TENANT,
            request=SandboxRequest(),
            state=SandboxState.CREATING,
            engine="local",
            created=now,
            used=now,
            node=gate.node,
        )
        await ledger.add_sandbox(half, "key", "")
        for id, status in (("sent", Status.RUNNING), ("waited", Status.QUEUED)):
            record = ExecRecord(id=id, sandbox=box, tenant=TENANT, command="x", status=status, created=now)
            assert await ledger.add_exec(record, "digest", 999 if id == "sent" else 0, fed=True)
        await database.close()
        async with gateway(core) as again:
            sent, waited = [await ended(again, box, id) for id in ("sent", "waited")]
            assert (sent.status, waited.status) == ("failed", "failed")
            told = await again.exec(TENANT, box, "sent")
            assert (told.returncode, "not run again" in told.reason) == (None, True)
            assert (await again.sandbox(TENANT, "half")).state is SandboxState.LOST
            assert (await again.sandbox(TENANT, gone)).state is SandboxState.LOST
            with pytest.raises(GatewayFault, match="gone when the gateway came back") as lost:
                await run(again, gone, "true")
            assert lost.value.status == 410
            assert (await again.create(TENANT, SandboxRequest(), "key")).id != "half"

    async def twice() -> None:
        async with gateway(settings(tmp_path / "one")):
            with pytest.raises(DatabaseError, match="for several use PostgreSQL"):
                await Gateway.open(settings(tmp_path / "one"))

    asyncio.run(scenario())
    asyncio.run(twice())
