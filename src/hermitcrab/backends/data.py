"""Where files live on this machine that outlive their sandbox."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hermitcrab.backends.given import wrong

DIRECTORY_VARIABLE = "HERMITCRAB_SANDBOX_DIR"


def data_directory(environ: Mapping[str, str]) -> Path:
    if given := environ.get(DIRECTORY_VARIABLE):
        return Path(given).expanduser()
    # Imported here: only persistent sandboxes need it.
    import platformdirs

    return Path(platformdirs.user_data_dir("hermitcrab")) / "sandboxes"


def task_directory(backend: str, task: str, environ: Mapping[str, str]) -> Path:
    """What a persistent sandbox of that task has on this machine."""
    return data_directory(environ) / backend / task


def remove_tree(directory: Path) -> None:
    """`rm`, because `shutil.rmtree` gives up where a command nested a thousand directories."""
    if subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL, check=False).returncode != 0:
        # Directories that their owner may not enter.
        subprocess.run(["chmod", "-R", "u+rwX", "--", directory], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(["rm", "-rf", "--", directory], stderr=subprocess.DEVNULL, check=False)


def refuse_task(task: str, backend: str) -> None:
    """A task's name is part of paths; ConfigError when it cannot be."""
    if task and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", task):
        takes = "takes letters, digits, dots, dashes and _, 63 at most"
        raise wrong("task_id", task, takes, backend=backend)
