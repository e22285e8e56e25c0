"""Whether this machine can run a microVM; if not, which of the reasons it is, and what to do."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from hermitcrab.core.protocols import Health

_CPUINFO, _KVM = Path("/proc/cpuinfo"), Path("/dev/kvm")
NO_CPU = Health(
    False,
    "the CPU cannot virtualise: /proc/cpuinfo has neither vmx (Intel) nor svm (AMD)",
    "Enable VT-x or AMD-V in the firmware; in a VM, enable nested virtualisation on its host.",
)
NO_DEVICE = Health(
    False,
    f"there is no {_KVM}",
    "As root: modprobe kvm_intel (or kvm_amd). In a container: start that with --device /dev/kvm.",
)
NO_PERMISSION = Health(
    False,
    f"no permission to use {_KVM}",
    "Join its group and log in again: sudo usermod -aG kvm $USER.",
)


def problem() -> Health | None:
    """What stands in the way; None when nothing is seen that does."""
    if platform.system() != "Linux":
        return None  # macOS has a hypervisor of its own
    return judged(
        machine=platform.machine(),
        cpuinfo=_CPUINFO.read_text(errors="replace"),
        device=_KVM.exists(),
        access=os.access(_KVM, os.R_OK | os.W_OK),
    )


def judged(*, machine: str, cpuinfo: str, device: bool, access: bool) -> Health | None:
    """The first thing that has to be repaired. A usable /dev/kvm alone does not mean that a VM boots."""
    if machine == "x86_64" and not re.search(r"\b(vmx|svm)\b", cpuinfo):
        return NO_CPU
    if not device:
        return NO_DEVICE
    return None if access else NO_PERMISSION
