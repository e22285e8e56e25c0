"""The way to work in a sandbox where no agent fits: slower, with the same promises.

The agent is on our side of the pipe. For each exec it runs a client program of its own (`docker exec -i`,
`ssh`), started ahead as ever. One bash stays in the sandbox (`keeper`): it ends what it is asked to end, and
everything when we are gone.

    link.py     frames to execs and back
    execs.py    one exec, from START to GONE
    keeper.py   the bash that stays
    files.py    READ and WRITE
    pipes.py    a program with three pipes
    inputs.py   several inputs on one pipe (pure)
    text.py     what is said to bash (pure)
    words.py    what it answers (pure)
"""

from __future__ import annotations

import asyncio

from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.core.plain.keeper import LEASE
from hermitcrab.core.plain.link import Enter, PlainLink
from hermitcrab.core.plain.text import FAR_END

__all__ = ["FAR_END", "Enter", "PlainLink", "start"]


async def start(backend: str, enter: Enter, lifeline: ClientProgram | None = None) -> AgentSandbox:
    """A sandbox that is entered anew for each program.

    A `lifeline` runs `FAR_END` in the sandbox, as `docker run -i IMAGE bash ...` does; its end is the
    sandbox's end. Without one, what we started there ends with us and the sandbox stays.
    """
    link = PlainLink(enter, lifeline, asyncio.get_running_loop())
    autopsy = None if lifeline is None else lifeline.autopsy
    return await AgentSandbox.over(backend, link, autopsy=autopsy, lease=LEASE)
