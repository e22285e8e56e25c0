"""Several gateways on one PostgreSQL, and a database that goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from hermitcrab.gateway.admission import TenantAdmission
from hermitcrab.gateway.core_settings import PoolSettings
from hermitcrab.gateway.database import DatabaseError
from hermitcrab.gateway.records import ExecRequest, GatewayFault, SandboxRequest, SandboxState
from hermitcrab.gateway.service import Gateway
from hermitcrab.gateway.settings import Limits
from hermitcrab.gateway.wire import Status
from tests.gateway.core_parts import (
    LONG_MS,
    TENANT,
    Program,
    ended,
    gateway,
    ready,
    run,
    settings,
    started,
    until,
)
from tests.gateway.postgres_parts import Way, database


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with database() as found:
        yield found


def test_two_gateways_share_the_work_and_one_takes_over_from_the_dead(tmp_path: Path, url: str) -> None:
    ran = tmp_path / "ran"
    waits = f"echo before; until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo x | tee -a {ran}"
    core = settings(tmp_path / "a", database=url, url="http://a", heartbeat=0.1, stale_after=0.6)
    other = settings(tmp_path / "b", database=url, url="http://b", heartbeat=0.1, stale_after=0.6)

    async def scenario(program: Program, theirs: str) -> None:
        async with gateway(core) as gate:
            assert await gate.holder(TENANT, theirs) == "http://b"
            with pytest.raises(GatewayFault, match="Another gateway") as elsewhere:
                await run(gate, theirs, "true")
            assert elsewhere.value.status == 503
            assert {each.id for each in await gate.sandboxes(TENANT)} == {theirs}
            ours = (await ready(gate)).id
            assert await gate.holder(TENANT, ours) is None
            assert gate.statistics().nodes == 2
            program.kill()
            await until(lambda: theirs in gate._sandboxes.held)
            assert await gate.holder(TENANT, theirs) is None
            assert (await gate.exec(TENANT, theirs, "waits")).status is Status.RUNNING
            (tmp_path / "go").touch()
            assert await ended(gate, theirs, "waits") == ("completed", 0, b"before\nx\n")
            assert ran.read_text() == "x\n"
            assert (await run(gate, theirs, "echo mine")).output == b"mine\n"
            assert {each.node for each in await gate.sandboxes(TENANT)} == {gate.node}

    with Program(other, commands={"waits": waits}, seen={"waits": "before"}) as program:
        theirs = program.line()
        assert program.line() == "started"
        asyncio.run(scenario(program, theirs))


def test_one_that_was_taken_for_dead_gives_way(tmp_path: Path, url: str) -> None:
    async def scenario() -> None:
        first = settings(tmp_path / "a", database=url, url="http://a", heartbeat=0.1, stale_after=30)
        second = settings(tmp_path / "b", database=url, url="http://b", heartbeat=0.1, stale_after=0.4)
        async with gateway(first) as frozen, gateway(second) as gate:
            keys = [each.create(TENANT, SandboxRequest(), "key") for each in (frozen, gate) * 3]
            assert len({each.id for each in await asyncio.gather(*keys)}) == 1, "two processes, one key"
            box = (await ready(frozen)).id
            running = await started(frozen, box, "sleep 0.7; echo done")
            await frozen._nodes.leave()
            await until(lambda: box in gate._sandboxes.held)
            await until(lambda: box not in frozen._sandboxes.held)
            assert await ended(gate, box, running) == ("completed", 0, b"done\n")
            assert (await frozen.sandbox(TENANT, box)).node == gate.node
            frozen._nodes.begin(frozen._each_beat, frozen._sandboxes.drop_foreign)
            await until(lambda: frozen.statistics().nodes == gate.statistics().nodes == 2)
            assert await frozen.holder(TENANT, box) == "http://b"
            assert (await ready(frozen)).node == frozen.node

    asyncio.run(scenario())


def test_a_database_that_goes_away_and_comes_back(tmp_path: Path, url: str) -> None:
    """Nothing is started meanwhile, what runs goes on, and its result is stored when that can be."""

    async def scenario() -> None:
        way, ran = Way(url), tmp_path / "ran"
        await way.mend()
        core = settings(tmp_path, database=way.url, heartbeat=0.1, stale_after=0.4, url="http://c")
        async with gateway(core) as gate:
            box = (await ready(gate)).id
            command = f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; yes | head -c 900000; echo done"
            running = await started(gate, box, command)
            await way.cut()
            asked = ExecRequest(exec_id="later", command=f"echo x >>{ran}", timeout_ms=LONG_MS)
            for _ in range(3):
                with pytest.raises(GatewayFault, match="does not answer") as refused:
                    await gate.start(TENANT, box, asked)
                assert (refused.value.status, refused.value.retry_after is not None) == (503, True)
            with pytest.raises(GatewayFault, match="does not answer"):
                await gate.create(TENANT, SandboxRequest(), "key of this test")
            (tmp_path / "go").touch()
            still = await gate.exec(TENANT, box, running, 0.5)
            assert still.status is Status.RUNNING, "not over before it is stored"
            await way.mend()
            assert (await ended(gate, box, running)).output == b"y\n" * 450_000 + b"done\n"
            await gate.start(TENANT, box, asked)
            assert (await ended(gate, box, "later")).status == "completed"
            assert ran.read_text() == "x\n"
            made = await gate.create(TENANT, SandboxRequest(), "key of this test")
            assert made.state is SandboxState.READY
            assert box in gate._sandboxes.held, "nobody took it over"
        await way.close()

    asyncio.run(scenario())


def test_a_database_that_is_not_there_is_an_error_that_says_so(tmp_path: Path) -> None:
    core = settings(tmp_path, database=f"postgresql://nobody@/none?host={tmp_path}")
    with pytest.raises(DatabaseError, match="PostgreSQL: "):
        asyncio.run(Gateway.open(core))
    with pytest.raises(DatabaseError, match="takes postgresql://"):
        asyncio.run(Gateway.open(settings(tmp_path, database="mysql://x")))


def test_a_tenant_has_so_many_sandboxes_in_all_gateways(tmp_path: Path, url: str) -> None:
    def at_most_three() -> TenantAdmission:
        return TenantAdmission(lambda _: Limits(sandboxes=3))

    pooled = settings(
        tmp_path / "a",
        "bubblewrap",
        database=url,
        url="http://a",
        pools=[PoolSettings(engine="bubblewrap", size=1)],
    )
    other = settings(tmp_path / "b", "bubblewrap", database=url, url="http://b")

    async def scenario(first: Gateway, second: Gateway) -> None:
        def pool() -> int:
            return first.statistics().pools[0].ready

        await until(lambda: pool() == 1)
        there = [await ready(first), await ready(second), await ready(second)]
        await until(lambda: pool() == 1)
        for gate in (first, second):
            with pytest.raises(GatewayFault, match="All your sandboxes are in use") as refused:
                await ready(gate)
            assert (refused.value.status, refused.value.retry_after) == (429, 5)
        assert pool() == 1, "it was put back"
        with pytest.raises(GatewayFault, match="All your sandboxes are in use"):
            await first.fork(TENANT, there[0].id, 1)
        await second.terminate(TENANT, there[1].id)
        await asyncio.gather(ready(first), ready(second), return_exceptions=True)
        assert sum(not each.state.over for each in await first.sandboxes(TENANT)) in (2, 3)

    async def both() -> None:
        async with gateway(pooled, at_most_three()) as first, gateway(other, at_most_three()) as second:
            await scenario(first, second)

    asyncio.run(both())
