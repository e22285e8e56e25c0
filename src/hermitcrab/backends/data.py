"""Where files live on this machine that outlive their sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

DIRECTORY_VARIABLE = "HERMITCRAB_SANDBOX_DIR"


def data_directory(environ: Mapping[str, str]) -> Path:
    if given := environ.get(DIRECTORY_VARIABLE):
        return Path(given).expanduser()
    # Imported here: only persistent sandboxes need it.
    import platformdirs

    return Path(platformdirs.user_data_dir("hermitcrab")) / "sandboxes"
