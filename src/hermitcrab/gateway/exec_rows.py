"""Execs and what they print, as rows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from hermitcrab.gateway.database import Database, Row
from hermitcrab.gateway.records import ExecRecord
from hermitcrab.gateway.wire import Status
from hermitcrab.result import Usage

_MOST_LISTED = 1000
OURS = "EXISTS (SELECT 1 FROM sandboxes WHERE id = $1 AND node = $2)"
"""Whether the sandbox `$1` is held by the process `$2`."""
_EXEC_COLUMNS = (
    "sandbox, id, tenant, command, digest, status, agent_id, fed, created, started, ended, returncode, "
    "output_bytes, rest_at, reason, user_seconds, system_seconds, peak_memory_bytes, out_of_memory"
)


@dataclass(frozen=True, kw_only=True)
class StoredExec:
    """An exec, and what only the gateway needs to know of it."""

    record: ExecRecord
    digest: str
    """Of all that was asked for."""
    agent_id: int
    """What its sandbox's agent calls it; 0 before it was started."""
    fed: bool
    """All of its stdin has been sent."""
    rest_at: int
    """Where the rest of its output begins, which is kept apart from the pages."""


class Piece(NamedTuple):
    """Some of an exec's output, as it is stored."""

    at: int
    data: bytes


class ExecRows:
    """The part of the ledger that commands need."""

    def __init__(self, database: Database, node: str) -> None:
        self.database, self.node = database, node

    async def add_exec(self, record: ExecRecord, digest: str, agent_id: int, *, fed: bool) -> bool:
        """False when the sandbox has one of that id, or is another process's."""
        sql = (
            "INSERT INTO execs (sandbox, id, tenant, command, digest, status, agent_id, fed, created, "
            "started, output_bytes, rest_at, reason) "
            "SELECT CAST($1 AS TEXT), $3, $4, $5, $6, $7, CAST($8 AS BIGINT), "
            "CAST($9 AS BIGINT), CAST($10 AS DOUBLE PRECISION), CAST($11 AS DOUBLE PRECISION), 0, 0, '' "
            f"WHERE {OURS} ON CONFLICT (sandbox, id) DO NOTHING"
        )
        added = await self.database.run(
            sql,
            record.sandbox,
            self.node,
            record.id,
            record.tenant,
            record.command,
            digest,
            record.status.value,
            agent_id,
            int(fed),
            record.created,
            record.started,
        )
        return added == 1

    async def launch_exec(self, record: ExecRecord, agent_id: int) -> bool:
        """One whose row is there, and that was not started yet, is about to be."""
        sql = (
            "UPDATE execs SET status = 'running', agent_id = $4, started = $5 "
            f"WHERE sandbox = $1 AND id = $3 AND status IN ('queued', 'running') AND {OURS}"
        )
        changed = await self.database.run(sql, record.sandbox, self.node, record.id, agent_id, record.started)
        return changed == 1

    async def fed(self, sandbox: str, id: str) -> None:
        await self.database.run("UPDATE execs SET fed = 1 WHERE sandbox = $1 AND id = $2", sandbox, id)

    async def finish_exec(self, record: ExecRecord, rest: Piece) -> bool:
        """False when it is over already, or another process holds its sandbox."""
        sql = (
            "UPDATE execs SET status = $4, returncode = $5, ended = $6, output_bytes = $7, rest_at = $8, "
            "rest = $9, reason = $10, told = $11, user_seconds = $12, system_seconds = $13, "
            "peak_memory_bytes = $14, out_of_memory = $15 WHERE sandbox = $1 AND id = $3 "
            f"AND status IN ('queued', 'running') AND {OURS}"
        )
        changed = await self.database.run(
            sql,
            record.sandbox,
            self.node,
            record.id,
            record.status.value,
            record.returncode,
            record.ended,
            record.output_bytes,
            rest.at,
            rest.data,
            record.reason,
            _told_bytes(record.told),
            *((None, None, None) if record.usage is None else astuple(record.usage)),
            int(record.out_of_memory),
        )
        return changed == 1

    async def exec(self, sandbox: str, id: str) -> StoredExec | None:
        sql = f"SELECT {_EXEC_COLUMNS}, told FROM execs WHERE sandbox = $1 AND id = $2"
        found = await self.database.rows(sql, sandbox, id)
        if not found:
            return None
        stored = _exec(found[0])
        return replace(stored, record=replace(stored.record, told=_told(found[0]["told"])))

    async def execs(self, sandbox: str) -> list[ExecRecord]:
        """The newest first."""
        sql = (
            f"SELECT {_EXEC_COLUMNS} FROM execs WHERE sandbox = $1 ORDER BY created DESC LIMIT {_MOST_LISTED}"
        )
        return [_exec(row).record for row in await self.database.rows(sql, sandbox)]

    async def unfinished(self, sandbox: str) -> list[StoredExec]:
        sql = (
            f"SELECT {_EXEC_COLUMNS} FROM execs WHERE sandbox = $1 AND status IN ('queued', 'running') "
            "ORDER BY created"
        )
        return [_exec(row) for row in await self.database.rows(sql, sandbox)]

    async def fail_execs(self, sandbox: str, reason: str) -> None:
        """All that did not end, because nobody can know what becomes of them."""
        sql = (
            "UPDATE execs SET status = 'failed', ended = $3, reason = $4 "
            f"WHERE sandbox = $1 AND status IN ('queued', 'running') AND {OURS}"
        )
        await self.database.run(sql, sandbox, self.node, time.time(), reason)

    async def add_page(self, sandbox: str, exec: str, piece: Piece, keep_from: int) -> None:
        """One more page; those that end before `keep_from` are dropped."""
        await self.database.all_of(
            (
                "INSERT INTO pages (sandbox, exec, at, data) VALUES ($1, $2, $3, $4) "
                "ON CONFLICT (sandbox, exec, at) DO NOTHING",
                (sandbox, exec, piece.at, piece.data),
            ),
            (
                "DELETE FROM pages WHERE sandbox = $1 AND exec = $2 AND at + length(data) <= $3",
                (sandbox, exec, keep_from),
            ),
        )

    async def stored_until(self, sandbox: str, exec: str) -> int:
        """The place of the first byte that is in no page."""
        sql = "SELECT max(at + length(data)) AS until FROM pages WHERE sandbox = $1 AND exec = $2"
        found = await self.database.rows(sql, sandbox, exec)
        return int(found[0]["until"] or 0)

    async def page(self, sandbox: str, exec: str, offset: int) -> Piece | None:
        """The first page that has something at `offset` or after it."""
        sql = (
            "SELECT at, data FROM pages WHERE sandbox = $1 AND exec = $2 AND at + length(data) > $3 "
            "ORDER BY at LIMIT 1"
        )
        found = await self.database.rows(sql, sandbox, exec, offset)
        return Piece(found[0]["at"], found[0]["data"]) if found else None

    async def rest(self, sandbox: str, exec: str) -> Piece | None:
        """The end of its output, which is in no page; None when there is no such exec."""
        sql = "SELECT rest_at, rest FROM execs WHERE sandbox = $1 AND id = $2"
        found = await self.database.rows(sql, sandbox, exec)
        return Piece(found[0]["rest_at"], found[0]["rest"] or b"") if found else None


def _told_bytes(told: Mapping[int, bytes]) -> bytes | None:
    """What a database keeps as one value: for each descriptor a line, then what is in it."""
    return b"".join(b"%d %d\n%s" % (number, len(data), data) for number, data in told.items()) or None


def _told(stored: bytes | None) -> dict[int, bytes]:
    told: dict[int, bytes] = {}
    rest = stored or b""
    while rest:
        line, _, rest = rest.partition(b"\n")
        number, length = map(int, line.split())
        told[number], rest = rest[:length], rest[length:]
    return told


def _exec(row: Row) -> StoredExec:
    peak = row["peak_memory_bytes"]
    return StoredExec(
        record=ExecRecord(
            id=row["id"],
            sandbox=row["sandbox"],
            tenant=row["tenant"],
            command=row["command"],
            status=Status(row["status"]),
            created=row["created"],
            started=row["started"],
            ended=row["ended"],
            returncode=row["returncode"],
            output_bytes=row["output_bytes"],
            reason=row["reason"],
            usage=None if peak is None else Usage(row["user_seconds"], row["system_seconds"], peak),
            out_of_memory=bool(row["out_of_memory"]),
        ),
        digest=row["digest"],
        agent_id=row["agent_id"],
        fed=bool(row["fed"]),
        rest_at=row["rest_at"],
    )
