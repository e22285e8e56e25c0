"""The way to work in a sandbox whose provider offers nothing but a blocking "run this" call.

The agent is on our side, as in `core/plain`, but there is no pipe: a START and all its inputs become one
call, made when the last input is closed, so that a shell started ahead costs nothing. Everything goes in by
the call's stdin, because an argv can be read by anybody in the sandbox, and comes back in its output, framed
by words that only we know. No terminals, and no input while a program runs.

    call.py     what a provider owes, and what is asked of it
    link.py     frames to execs and back
    execs.py    one exec, from START to GONE
    files.py    READ and WRITE
    programs.py programs of our own
    answer.py   what a call's output says (pure)
    text.py     what is said to bash (pure)
"""

from __future__ import annotations

import asyncio

from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.blocking.call import Call, Caller, CallLost, Ended, How, SandboxGone
from hermitcrab.core.blocking.link import BlockingLink

__all__ = ["BlockingLink", "Call", "CallLost", "Caller", "Ended", "How", "SandboxGone", "start"]


async def start(backend: str, caller: Caller, *, lease: float | None = None) -> AgentSandbox:
    """A sandbox whose every program is a call. `lease` is how long it lives on without one."""
    sandbox = await AgentSandbox.over(backend, BlockingLink(caller, asyncio.get_running_loop()), lease=lease)
    sandbox.live_stdin = False
    return sandbox
