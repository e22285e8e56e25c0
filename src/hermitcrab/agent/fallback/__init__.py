"""The agent in plain Python, for places where the C one cannot run (see PROTOCOL.md).

    python -m hermitcrab.agent.fallback

`agent` serves the client's pipe. For each exec it forks a `supervisor`, which starts the program (`launch`),
reaps whatever that leaves, and ends it on demand (`descendants`). Agent and supervisor talk the wire format
over a socket pair: down go SIGNAL, KILL and TIMER, up come HELLO with the program's pid, EXIT and GONE.
"""

from __future__ import annotations

from hermitcrab.agent.fallback.agent import main

__all__ = ["main"]
