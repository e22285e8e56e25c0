"""Long work of another program, such as pulling an image: its own progress is shown, or logged."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections import deque
from collections.abc import Sequence

_LINES_KEPT = 5


def run_shown(words: Sequence[str], log: logging.Logger) -> tuple[int, str]:
    """Its status and its last words. A terminal gets the progress as it is, otherwise the log gets lines."""
    if sys.stderr.isatty():
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False)
        return done.returncode, "see above"
    last: deque[str] = deque(maxlen=_LINES_KEPT)
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            log.info("%s", line.strip())
            last.append(line)
    return running.returncode, "".join(last)
