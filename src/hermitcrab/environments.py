"""An environment for each backend, under the name that people know and with its own settings as arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hermitcrab.core.state import ShellState
from hermitcrab.environment import Environment


class LocalEnvironment(Environment):
    """A session on this machine itself, without isolation."""

    def __init__(
        self,
        cwd: str = "",
        timeout: float | None = None,
        *,
        env: Mapping[str, Any] | None = None,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "local",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(cwd=cwd, timeout=timeout, env=env),
            **options,
        )


class BubblewrapEnvironment(Environment):
    """A session in a bubblewrap sandbox: no daemon, no network unless asked for, one writable workspace."""

    def __init__(
        self,
        workspace: str | Path | None = None,
        cwd: str = "",
        timeout: float | None = None,
        *,
        network: bool | None = None,
        env: Mapping[str, Any] | None = None,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "bubblewrap",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(workspace=workspace, cwd=cwd, timeout=timeout, network=network, env=env),
            **options,
        )


class DockerEnvironment(Environment):
    """A session in a hardened container of its own. `memory` and `disk` are in MiB."""

    _engine = "docker"

    def __init__(
        self,
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        disk: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        volumes: Sequence[str] | None = None,
        forward_env: Sequence[str] | None = None,
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        host_cwd: str | Path | None = None,
        auto_mount_cwd: bool | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            self._engine,
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                image=image,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                volumes=volumes,
                forward_env=forward_env,
                env=env,
                network=network,
                host_cwd=host_cwd,
                auto_mount_cwd=auto_mount_cwd,
            ),
            **options,
        )


class PodmanEnvironment(DockerEnvironment):
    """The same by Podman, with or without root."""

    _engine = "podman"


class SSHEnvironment(Environment):
    """A session on a remote host, over the user's own ssh client and its config."""

    def __init__(
        self,
        host: str = "",
        user: str = "",
        port: int | None = None,
        key_path: str | Path | None = None,
        cwd: str = "",
        timeout: float | None = None,
        *,
        env: Mapping[str, Any] | None = None,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "ssh",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(host=host, user=user, port=port, key_path=key_path, cwd=cwd, timeout=timeout, env=env),
            **options,
        )


class ApptainerEnvironment(Environment):
    """A session in a contained Apptainer container: no daemon, no root. `memory` and `disk` are in MiB."""

    def __init__(
        self,
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        disk: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        volumes: Sequence[str] | None = None,
        forward_env: Sequence[str] | None = None,
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "apptainer",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                image=image,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                volumes=volumes,
                forward_env=forward_env,
                env=env,
                network=network,
            ),
            **options,
        )


SingularityEnvironment = ApptainerEnvironment


class MicrosandboxEnvironment(Environment):
    """A session in a microVM on this machine. `memory` and `disk` are in MiB."""

    def __init__(
        self,
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: int | None = None,
        memory: int | None = None,
        disk: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        volumes: Sequence[str] | None = None,
        forward_env: Sequence[str] | None = None,
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        max_duration: float | None = None,
        idle_timeout: float | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "microsandbox",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                image=image,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                volumes=volumes,
                forward_env=forward_env,
                env=env,
                network=network,
                max_duration=max_duration,
                idle_timeout=idle_timeout,
            ),
            **options,
        )


class E2BEnvironment(Environment):
    """A session in a microVM at e2b.dev. CPUs, memory (MiB) and disk are as the template was built."""

    def __init__(
        self,
        template: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: int | None = None,
        memory: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "e2b",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                template=template,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                env=env,
                network=network,
            ),
            **options,
        )


class ModalEnvironment(Environment):
    """A session in a container at modal.com. `memory` is in MiB; a disk has no limit there."""

    def __init__(
        self,
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "modal",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                image=image,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                env=env,
                network=network,
            ),
            **options,
        )


class DaytonaEnvironment(Environment):
    """A session in a sandbox at daytona.io. `memory` and `disk` are in MiB, and need an image."""

    def __init__(
        self,
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        disk: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "daytona",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                image=image,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                env=env,
                network=network,
            ),
            **options,
        )


class VercelSandboxEnvironment(Environment):
    """A session in a microVM at Vercel. `memory` is in MiB, 2048 for each vCPU; a disk has no limit there."""

    def __init__(
        self,
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        disk: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        runtime: str = "",
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "vercel",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                image=image,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                runtime=runtime,
                env=env,
                network=network,
            ),
            **options,
        )


class GatewayEnvironment(Environment):
    """A session in a sandbox of a gateway, over HTTP. `memory` and `disk` are in MiB."""

    def __init__(
        self,
        url: str = "",
        token: str = "",
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        cpu: float | None = None,
        memory: int | None = None,
        disk: int | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        env: Mapping[str, Any] | None = None,
        network: bool | None = None,
        *,
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "gateway",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                url=url,
                token=token,
                image=image,
                cwd=cwd,
                timeout=timeout,
                cpu=cpu,
                memory=memory,
                disk=disk,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                env=env,
                network=network,
            ),
            **options,
        )


class ManagedModalEnvironment(Environment):
    """A session in a sandbox at Modal, through a gateway that holds the account: HERMITCRAB_MANAGED_MODAL_URL
    and HERMITCRAB_MANAGED_MODAL_TOKEN say which, where `url` and `token` do not."""

    def __init__(
        self,
        image: str = "",
        cwd: str = "",
        timeout: float | None = None,
        modal_sandbox_kwargs: Mapping[str, Any] | None = None,
        persistent_filesystem: bool | None = None,
        task_id: str = "",
        env: Mapping[str, Any] | None = None,
        *,
        url: str = "",
        token: str = "",
        state: ShellState | None = None,
        keep_code: bool = False,
        snapshot: str = "",
        **options: Any,
    ) -> None:
        super().__init__(
            "managed-modal",
            state=state,
            keep_code=keep_code,
            snapshot=snapshot,
            **given(
                image=image,
                cwd=cwd,
                timeout=timeout,
                modal_sandbox_kwargs=modal_sandbox_kwargs,
                persistent_filesystem=persistent_filesystem,
                task_id=task_id,
                env=env,
                url=url,
                token=token,
            ),
            **options,
        )


def given(**options: Any) -> dict[str, Any]:
    """The options that were really given; the others stay open to the config files."""
    return {name: value for name, value in options.items() if value is not None and value != ""}
