"""Apptainer where no agent fits: an instance, which each program enters by an `apptainer exec` of its own."""

from __future__ import annotations

import os
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hermitcrab.backends.apptainer.flags import Host, entering_line, instance_line
from hermitcrab.backends.apptainer.program import NAME, QUESTION_SECONDS, environment
from hermitcrab.backends.volumes import Mount
from hermitcrab.core import plain
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram

if TYPE_CHECKING:
    from hermitcrab.backends.apptainer import ApptainerConfig

# An image that Apptainer did not build has none, and an instance wants one.
_START = "/.singularity.d/actions/start"
_NOTHING = "#!/bin/bash\n"


async def start(
    program: str, config: ApptainerConfig, host: Host, fds: Sequence[int], *, limits: bool
) -> AgentSandbox:
    directory = Path(tempfile.mkdtemp(prefix="hermitcrab-"))
    action = directory / "start"
    action.write_text(_NOTHING)
    action.chmod(0o755)
    host = replace(host, mounts=[*host.mounts, Mount(str(action), _START, True)])
    instance = _Instance(program, f"hermitcrab-{secrets.token_hex(8)}", directory)
    start = instance.argv(instance_line(config, host, instance.name, limits=limits))

    def enter(argv: Sequence[str]) -> ClientProgram:
        return instance.client(instance.argv(entering_line(config, instance.name, argv)))

    # A shell around the lifeline, because nobody else is left to end the instance when we were killed.
    script = (
        f"{shlex.join(start)} </dev/null >/dev/null && {shlex.join(enter(plain.FAR_END).argv)}; status=$?; "
        f"{shlex.join(instance.stop)} >/dev/null 2>&1; rm -rf {shlex.quote(str(directory))}; exit $status"
    )
    lifeline = replace(instance.client(["sh", "-c", script]), pass_fds=fds, release=instance.end)
    return await plain.start(NAME, enter, lifeline)


@dataclass(frozen=True)
class _Instance:
    program: str
    name: str
    directory: Path
    """Apptainer's notes and logs of it, in place of the user's ~/.apptainer where they would stay."""

    @property
    def stop(self) -> list[str]:
        return self.argv(["--silent", "instance", "stop", "--force", self.name])

    def argv(self, words: Sequence[str]) -> list[str]:
        return [self.program, *words]

    def client(self, argv: Sequence[str]) -> ClientProgram:
        own = {"APPTAINER_CONFIGDIR": str(self.directory), "SINGULARITY_CONFIGDIR": str(self.directory)}
        return ClientProgram(argv, {**environment(os.environ), **own})

    def end(self) -> None:
        """What the shell does, when that was killed too."""
        if self.directory.exists():
            client = self.client(self.stop)
            subprocess.run(
                client.argv,
                env=dict(client.env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=QUESTION_SECONDS,
                check=False,
            )
            shutil.rmtree(self.directory, ignore_errors=True)
