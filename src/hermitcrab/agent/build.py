"""Compiles the agent for the machines it is shipped for. Run it, or load it by path: it needs only Python.

``python build.py [directory]`` puts `agent-linux-x86_64` and `agent-linux-aarch64` there.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted((HERE / "c").glob("*.c"))
MACHINES = ("x86_64", "aarch64")
FLAGS = ("-std=gnu11", "-static", "-Os", "-s", "-Wall", "-Wextra", "-Werror")


def compilers(machine: str) -> list[list[str]]:
    """What may compile for that machine, the best first: with musl it is a tenth of the size to send."""
    candidates: list[list[str]] = [[f"{machine}-linux-musl-gcc"]]
    if sys.platform == "linux" and _own_machine() == machine:
        candidates.append(shlex.split(os.environ.get("CC") or "cc"))
    candidates.append([f"{machine}-linux-gnu-gcc"])
    found = [command for command in candidates if command and shutil.which(command[0])]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl"])
    return found


def compile_for(machine: str, target: Path, *, log: Callable[[str], object] = print) -> bool:
    """Tries each compiler until one succeeds. The target is replaced in one step or not at all."""
    commands = compilers(machine)
    if not commands:
        log(f"agent for {machine}: skipped, no compiler ({machine}-linux-gnu-gcc or the ziglang package)")
        return False
    for command in commands:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        try:
            done = subprocess.run(
                [*command, *FLAGS, "-o", name, *map(str, SOURCES)],
                capture_output=True,
                text=True,
                errors="replace",
            )
            if done.returncode == 0:
                os.chmod(name, 0o755)
                os.replace(name, target)
                log(f"agent for {machine}: {target} ({target.stat().st_size} bytes, by {command[0]})")
                return True
            log(f"agent for {machine}: {shlex.join(command)} failed\n{done.stderr.strip()}")
        except OSError as error:
            log(f"agent for {machine}: {shlex.join(command)} failed: {error}")
        finally:
            Path(name).unlink(missing_ok=True)
    log(f"agent for {machine}: skipped, no compiler succeeded")
    return False


def build(target_dir: Path, *, log: Callable[[str], object] = print) -> list[Path]:
    """Compiles for every machine that this one has a compiler for, and says what it left out."""
    target_dir.mkdir(parents=True, exist_ok=True)
    targets = {machine: target_dir / f"agent-linux-{machine}" for machine in MACHINES}
    return [target for machine, target in targets.items() if compile_for(machine, target, log=log)]


def _own_machine() -> str:
    machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


def main() -> int:
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "bin"
    return 0 if build(directory) else 1


if __name__ == "__main__":
    sys.exit(main())
