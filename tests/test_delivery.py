"""The agent through the pipe: into a sandbox that has only a shell."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from hermitcrab.agent import program
from hermitcrab.core import delivery
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.client import ClientProgram
from hermitcrab.errors import SandboxStartError

T = TypeVar("T")


def client(*shell: str, script: str = "", env: dict[str, str] | None = None) -> ClientProgram:
    return ClientProgram([*shell, "-c", script or delivery.install_script()], {**os.environ, **(env or {})})


def delivered(client: ClientProgram, use: Callable[[AgentSandbox], Awaitable[T]]) -> T:
    async def main() -> T:
        sandbox = await delivery.start("test", client)
        try:
            return await use(sandbox)
        finally:
            await sandbox.release()

    return asyncio.run(main())


async def words(sandbox: AgentSandbox, argv: Sequence[str]) -> bytes:
    process = await sandbox.spawn(argv)
    said = b"".join([chunk.data async for chunk in process.output()])
    await process.wait()
    return said


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])
def test_the_agent_comes_through_the_pipe_and_leaves_no_file(shell: str, tmp_path: Path) -> None:
    private = {"XDG_RUNTIME_DIR": str(tmp_path)}

    async def look(sandbox: AgentSandbox) -> list[str]:
        assert await words(sandbox, ["echo", "here"]) == b"here\n"
        return os.listdir(tmp_path)

    assert delivered(client(shell, env=private), look) == []


def test_while_it_is_there_it_is_the_users_alone(tmp_path: Path) -> None:
    script = delivery.install_script().replace('exec "$_f"', 'stat -c %a "$_f" >&2 && exec "$_f"')
    show = tmp_path / "stderr"
    wrapped = f"exec 2>{shlex.quote(str(show))}; umask 000; {script}"

    async def umask(sandbox: AgentSandbox) -> bytes:
        return await words(sandbox, ["sh", "-c", "umask"])

    assert delivered(client("sh", script=wrapped), umask) == b"0000\n"
    assert show.read_text().split()[0] == "700"


def test_what_is_said_before_does_not_disturb(tmp_path: Path) -> None:
    noisy = f"echo Welcome; printf 'motd \\0 %s' HCRAB; echo; {delivery.install_script()}"

    async def echo(sandbox: AgentSandbox) -> bytes:
        return await words(sandbox, ["echo", "here"])

    assert delivered(client("sh", script=noisy), echo) == b"here\n"


def test_without_head_it_still_arrives(tmp_path: Path) -> None:
    for name in ("uname", "cat", "rm", "chmod", "dd"):
        found = shutil.which(name)
        assert found
        (tmp_path / name).symlink_to(found)

    async def echo(sandbox: AgentSandbox) -> bytes:
        return await words(sandbox, ["/bin/echo", "here"])

    assert delivered(client("/bin/sh", env={"PATH": str(tmp_path)}), echo) == b"here\n"


def test_a_machine_without_a_binary_is_no_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(program, "BINARIES", tmp_path)
    with pytest.raises(delivery.NoAgent, match="no agent program for Linux on"):
        delivered(client("sh"), _unreachable)


def test_nowhere_to_run_a_program_is_no_agent_and_leaves_nothing() -> None:
    mounts = "/dev/shm /tmp /var/tmp /root /run"
    inside = f"for d in {mounts}; do mount -t tmpfs -o noexec none $d; done; cd /run; HOME=/root; "
    entered = ClientProgram(
        [
            "unshare",
            "--mount",
            "sh",
            "-c",
            f"{inside} {delivery.install_script()}; find {mounts} -type f >&2",
        ],
        {"PATH": os.environ["PATH"]},
    )
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("mount namespaces need root")
    with pytest.raises(delivery.NoAgent, match="no directory there") as refused:
        delivered(entered, _unreachable)
    assert refused.value.__cause__ is not None
    assert ".hermitcrab" not in str(refused.value.__cause__)


def test_a_program_that_is_no_shell_is_a_start_error() -> None:
    with pytest.raises(SandboxStartError, match="not what you think"):
        delivered(ClientProgram(["sh", "-c", "echo not what you think >&2"], {}), _unreachable)


def test_the_script_survives_any_login_shell() -> None:
    script = delivery.install_script(lease=7200)
    assert not set("'!\n\\") & set(script)
    assert "--lease 7200" in script


async def _unreachable(sandbox: AgentSandbox) -> None:
    raise AssertionError("it started")
