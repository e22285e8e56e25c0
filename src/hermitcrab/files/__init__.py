"""Files between the host and a sandbox."""

from hermitcrab.files.entries import FileInfo, Limits, Progress

__all__ = ["FileInfo", "Limits", "Progress"]
