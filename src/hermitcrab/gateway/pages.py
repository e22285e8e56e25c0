"""What an exec has printed, from any place on."""

from __future__ import annotations

from dataclasses import replace

from hermitcrab.gateway.exec_rows import ExecRows, Piece
from hermitcrab.gateway.execs import Exec
from hermitcrab.gateway.records import Page, unknown_exec


async def page_of(
    ledger: ExecRows, sandbox: str, id: str, running: Exec | None, offset: int, limit: int
) -> Page:
    """Output from a place on: from memory while it is not stored, else from the database."""
    page = running.live(offset, limit) if running else None
    if page is not None:
        return page
    rest = await ledger.rest(sandbox, id)
    if rest is None:
        raise unknown_exec()
    if offset < rest.at or (running is not None and not running.over):
        piece = await ledger.page(sandbox, id, offset)
        if piece is not None:
            return _cut(piece, offset, limit)
        page = running.live(max(offset, running.stored_until), limit) if running else None
        if page is not None:
            return page
        rest = await ledger.rest(sandbox, id) or rest
    page = _cut(rest, offset, limit)
    return replace(page, end=page.offset + len(page.data) >= rest.at + len(rest.data))


def _cut(piece: Piece, offset: int, limit: int) -> Page:
    at = max(offset, piece.at)
    return Page(at, piece.data[at - piece.at : at - piece.at + limit], False)
