"""Builds the agent program into wheels and editable installs.

The wheel stays `py3-none-any`: the programs in it run inside Linux sandboxes of either architecture,
whatever machine the package itself is installed on.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

AGENT = Path("src/hermitcrab/agent")
WITHOUT = (
    "hermitcrab is installed without {missing}: the slower Python agent takes its place. "
    "Install a C compiler (Debian: gcc libc6-dev, and gcc-aarch64-linux-gnu libc6-dev-arm64-cross for "
    "aarch64 sandboxes) and reinstall; `hermitcrab doctor` tells what is in use."
)


class AgentBuildHook(BuildHookInterface[Any]):
    """Calls `agent/build.py`; a machine without a compiler still gets a working install."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        try:
            built = load_by_path(root / AGENT / "build.py").build(
                root / AGENT / "bin", log=self.app.display_info
            )
        except Exception as error:
            # A compiler can fail in more ways than can be listed, and none of them may cost the install.
            self.app.display_warning(f"the agent program was not built: {error}")
            built = []
        if not built:
            self.app.display_warning(WITHOUT.format(missing="the agent program"))


def load_by_path(path: Path) -> Any:
    """The module in that file, without importing the package that is being built."""
    spec = importlib.util.spec_from_file_location("hermitcrab_agent_build", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
