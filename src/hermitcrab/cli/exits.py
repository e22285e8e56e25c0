"""Exit codes, and leaving quietly when nobody reads us any more."""

from __future__ import annotations

import os
import sys

USAGE = 2
SANDBOX = 125
"""As `docker run` and `env` have it: the command was not started, or its fate is unknown."""
INTERRUPTED = 130
BROKEN_PIPE = 141
SIGNAL = 128
"""Plus a signal's number."""


def forget_stdout() -> None:
    """Let the interpreter's last flush go nowhere, so that `| head` prints no traceback."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
