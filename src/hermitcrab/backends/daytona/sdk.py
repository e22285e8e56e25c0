"""The names of Daytona's SDK that are used here.

`import daytona` loads nothing by itself, and the first use of a name takes most of two seconds: importing
this module is what others on the loop need not wait for.
"""

from __future__ import annotations

from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    DaytonaConflictError,
    DaytonaConnectionError,
    DaytonaError,
    DaytonaNotFoundError,
    ListSandboxesQuery,
    Resources,
)

__all__ = [
    "AsyncDaytona",
    "AsyncSandbox",
    "CreateSandboxFromImageParams",
    "CreateSandboxFromSnapshotParams",
    "DaytonaConflictError",
    "DaytonaConnectionError",
    "DaytonaError",
    "DaytonaNotFoundError",
    "ListSandboxesQuery",
    "Resources",
]
