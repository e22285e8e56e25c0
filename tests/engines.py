"""Where `scripts/engines` put what the tests run on."""

from __future__ import annotations

from pathlib import Path

ENGINES = Path(__file__).parent.parent / ".engines"
IMAGE = "hermitcrab-test:latest"
SSH = {"host": "hermitcrab-test", "config_file": ENGINES / "ssh" / "config"}
APPTAINER = {"image": str(ENGINES / "apptainer" / "images" / "hermitcrab-test")}
