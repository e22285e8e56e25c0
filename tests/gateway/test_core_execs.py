"""Commands of a gateway, without HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from hermitcrab.gateway.admission import TenantAdmission
from hermitcrab.gateway.records import ExecRequest, GatewayFault
from hermitcrab.gateway.settings import Limits
from hermitcrab.gateway.wire import Status
from tests.gateway.core_parts import LONG_MS, TENANT, ended, gateway, ready, run, settings, started, until


def test_what_a_command_prints_and_how_it_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(settings(tmp_path)) as gate:
            box = (await ready(gate, cwd=str(tmp_path))).id
            mixed = "for i in 1 2 3; do echo $i; echo $i >&2; done; exit 3"
            assert await run(gate, box, mixed) == ("completed", 3, b"1\n1\n2\n2\n3\n3\n")
            assert await run(gate, box, "kill -9 $$") == ("completed", 137, b"")
            assert await run(gate, box, "pwd") == ("completed", 0, f"{tmp_path}\n".encode())
            assert (await run(gate, box, "pwd", cwd="/")).output == b"/\n"
            missing = await run(gate, box, "echo no", cwd=f"{tmp_path}/no")
            assert (missing.status, missing.returncode) == ("completed", 126)
            assert b"No such file" in missing.output
            assert missing.output.count(b"\n") == 1
            assert (await run(gate, box, "cat", stdin=b"a\0\xff")).output == b"a\0\xff"
            assert (await run(gate, box, "cat")).output == b""
            large = b"0123456789abcde\n" * 200_000
            assert (await run(gate, box, "md5sum", stdin=large)).output.split()[0] == (
                (await run(gate, box, "yes 0123456789abcde | head -n 200000 | md5sum")).output.split()[0]
            )
            padding = "# " + "x" * 300_000 + "\n"
            long = await run(
                gate, box, f'{padding}echo "$0 $# ${{__c-none}}"; readlink /proc/$$/fd/9; exit 5'
            )
            assert long == ("completed", 5, b"bash 0 none\n")
            longest = await run(gate, box, f"cat; {padding * 4}echo more", stdin=large[:100])
            assert longest.output == large[:100] + b"more\n"

    asyncio.run(scenario())


def alive(pid: Path) -> bool:
    return Path(f"/proc/{pid.read_text().strip()}").exists()


def test_time_limits_and_cancelling_leave_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        pid = tmp_path / "pid"
        command = f"echo so far; setsid bash -c 'echo $$ >{pid}; exec sleep 1000' & sleep 1000"
        async with gateway(settings(tmp_path)) as gate:
            box = (await ready(gate)).id
            assert await run(gate, box, command, timeout_ms=400) == ("timeout", 124, b"so far\n")
            assert not alive(pid)
            pid.unlink()
            id = await started(gate, box, command)
            await until(lambda: pid.exists() and pid.read_text())
            cancelled = await gate.cancel(TENANT, box, id)
            assert (cancelled.status, cancelled.returncode) == (Status.CANCELLED, 130)
            assert not alive(pid)
            assert await gate.cancel(TENANT, box, id) == cancelled, "once is enough"
            assert (await run(gate, box, "sleep 1000 & echo on")).output == b"on\n"

    asyncio.run(scenario())


def test_an_exec_id_runs_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        ran = tmp_path / "ran"
        asked = ExecRequest(exec_id="one", command=f"echo x >>{ran}; sleep 0.1", timeout_ms=LONG_MS)
        async with gateway(settings(tmp_path)) as gate:
            box = (await ready(gate)).id
            records = await asyncio.gather(*(gate.start(TENANT, box, asked) for _ in range(20)))
            assert {(each.id, each.status) for each in records} == {("one", Status.RUNNING)}
            assert (await ended(gate, box, "one")).status == "completed"
            assert (await gate.start(TENANT, box, asked)).status is Status.COMPLETED
            assert ran.read_text() == "x\n"
            with pytest.raises(GatewayFault, match="another command") as refused:
                await gate.start(TENANT, box, ExecRequest(exec_id="one", command="no", timeout_ms=1000))
            assert refused.value.status == 409
            with pytest.raises(GatewayFault, match="without NUL"):
                await gate.start(TENANT, box, ExecRequest(exec_id="nul", command="a\0b", timeout_ms=1000))
            assert [each.id for each in await gate.execs(TENANT, box)] == ["one"]

    asyncio.run(scenario())


def test_output_is_stored_in_pages_and_the_last_of_it_kept(tmp_path: Path) -> None:
    """Nobody reads while it is printed, and a slow reader finds the rest."""

    async def scenario() -> None:
        size, keep = 6_000_000, 2 << 20
        async with gateway(settings(tmp_path, output_bytes=keep)) as gate:
            box = (await ready(gate)).id
            id = await started(gate, box, f"yes 1234567 | head -c {size}; echo; sleep 0.1; echo end")
            live = [page async for page in gate.follow(TENANT, box, id)]
            assert live[-1].end
            assert b"".join(page.data for page in live).endswith(b"end\n")
            record = await gate.exec(TENANT, box, id)
            assert record.output_bytes == size + 5
            kept, offset = b"", 0
            while not (page := await gate.page(TENANT, box, id, offset, 100_000)).end:
                assert len(page.data) <= 100_000
                assert page.offset == offset or not kept
                kept, offset = kept + page.data, page.offset + len(page.data)
            kept += page.data
            assert kept.endswith(b"1234567\n\nend\n")
            assert keep <= len(kept) <= keep + (2 << 20), "the last of it: whole pages, and what came after"
            assert (await gate.page(TENANT, box, id, size + 1)).data == b"end\n"
            beyond = await gate.page(TENANT, box, id, size + 1000)
            assert (beyond.data, beyond.end) == (b"", True)

    asyncio.run(scenario())


def test_commands_wait_in_a_bounded_queue(tmp_path: Path) -> None:
    async def scenario() -> None:
        admission = TenantAdmission(lambda _: Limits(execs=1, queue=2))
        go, ran = tmp_path / "go", tmp_path / "ran"
        async with gateway(settings(tmp_path), admission) as gate:
            box = (await ready(gate)).id
            first = await started(gate, box, f"until [ -e {go} ]; do sleep 0.02; done; echo 1 >>{ran}")
            second = await started(gate, box, f"echo 2 >>{ran}")
            third = await started(gate, box, f"echo 3 >>{ran}")
            assert (await gate.exec(TENANT, box, second)).status is Status.QUEUED
            with pytest.raises(GatewayFault) as full:
                await started(gate, box, "echo 4")
            assert (full.value.status, full.value.retry_after is not None) == (429, True)
            assert (await gate.cancel(TENANT, box, second)).status is Status.CANCELLED
            assert (gate.statistics().running, gate.statistics().queued) == (1, 1)
            go.touch()
            assert (await ended(gate, box, first)).status == "completed"
            assert (await ended(gate, box, third)).status == "completed"
            assert ran.read_text() == "1\n3\n"
            assert gate.statistics().execs == {"completed": 2, "cancelled": 1}

    asyncio.run(scenario())


def test_a_tenant_sees_nothing_of_another(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with gateway(settings(tmp_path)) as gate:
            box = (await ready(gate)).id
            id = await started(gate, box, "echo secret")
            await ended(gate, box, id)
            asked = ExecRequest(exec_id="x", command="id", timeout_ms=1000)
            for tenant in ("other", ""):
                calls = (
                    gate.sandbox(tenant, box),
                    gate.start(tenant, box, asked),
                    gate.exec(tenant, box, id),
                    gate.execs(tenant, box),
                    gate.page(tenant, box, id),
                    gate.cancel(tenant, box, id),
                    gate.files(tenant, box),
                    gate.terminal(tenant, box),
                    gate.snapshot(tenant, box),
                    gate.fork(tenant, box),
                    gate.terminate(tenant, box),
                )
                for call in calls:
                    with pytest.raises(GatewayFault, match="There is no such sandbox") as refused:
                        await call
                    assert refused.value.status == 404
            assert await gate.sandboxes("other") == []
            with pytest.raises(GatewayFault, match="no such exec"):
                await gate.page(TENANT, box, "unknown")

    asyncio.run(scenario())
