"""Which machine this is: figures mean nothing without it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path


def describe() -> dict[str, str]:
    load = os.getloadavg()
    return {
        "cpu": cpu_model(_text("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": memory(_text("/proc/meminfo")) or "unknown",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "bash": _bash_version(),
        "load average at the start": f"{load[0]:.2f}",
    }


def cpu_model(cpuinfo: str) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else ""


def memory(meminfo: str) -> str:
    found = re.search(r"^MemTotal:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return f"{int(found[1]) / (1 << 20):.1f} GiB" if found else ""


def _bash_version() -> str:
    try:
        answer = subprocess.run(["bash", "-c", 'echo "$BASH_VERSION"'], capture_output=True, text=True)
    except OSError:
        return "none"
    return answer.stdout.strip()


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
