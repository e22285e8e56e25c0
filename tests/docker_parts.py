"""Engines and images of a test's own: a directory as an image, a registry, a daemon."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self

from hermitcrab.backends.docker.engine import Engine
from hermitcrab.backends.docker.engine_text import DOCKER


@contextmanager
def imported(root: Path, *changes: str) -> Iterator[str]:
    """A directory as an image, for a while."""
    tag = f"hermitcrab-made:{os.getpid()}"
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        settings = [word for change in changes for word in ("--change", change)]
        subprocess.run(
            ["docker", "import", *settings, "-", tag], stdin=tar.stdout, check=True, capture_output=True
        )
    try:
        yield tag
    finally:
        subprocess.run(["docker", "rmi", tag], check=True, capture_output=True)
        Engine.find(DOCKER).forget(tag)


def copy_bash(root: Path) -> None:
    """This machine's bash and the libraries that it needs, and nothing else."""
    copy_programs(root, "bash")


def copy_programs(root: Path, *names: str) -> None:
    programs = [f"/bin/{name}" for name in names]
    needs = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for path in {*programs, *re.findall(r"/lib\S+", needs)}:
        (root / path[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path[1:])


class Registry(ThreadingHTTPServer):
    """Serves one directory as an image, the way registries do."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), RegistryHandler)
        self.image = f"127.0.0.1:{self.server_port}/hermitcrab:1"
        tar = subprocess.run(["tar", "-C", str(root), "-c", "."], capture_output=True, check=True).stdout
        layer = gzip.compress(tar)
        history = {"rootfs": {"type": "layers", "diff_ids": [digest(tar)]}}
        config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, **history}).encode()
        kind = "application/vnd.docker."
        parts = {
            "config": described(config, f"{kind}container.image.v1+json"),
            "layers": [described(layer, f"{kind}image.rootfs.diff.tar.gzip")],
        }
        self.manifest_type = f"{kind}distribution.manifest.v2+json"
        manifest = json.dumps({"schemaVersion": 2, "mediaType": self.manifest_type, **parts}).encode()
        self.content = {digest(each): each for each in (layer, config, manifest)}
        self.content |= {"1": manifest, "": b"{}"}

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class RegistryHandler(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        body = self.server.content[self.path.rpartition("/")[2]]
        kind = self.server.manifest_type if "/manifests/" in self.path else "application/octet-stream"
        self.send_response(200)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.send_header("Docker-Content-Digest", digest(body))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def described(content: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": kind, "size": len(content), "digest": digest(content)}


class Daemon:
    """A Docker daemon of a test's own, in its own network namespace."""

    def __init__(self, directory: Path, hidden: Path | None = None) -> None:
        self._directory = directory
        self._hidden = directory / "nothing" if hidden is None else hidden
        """What the daemon does not see of this machine."""
        (directory / "nothing").mkdir()
        self.address = f"unix://{directory}/socket"
        self.start()

    def start(self) -> None:
        at = self._directory
        own = [
            "--data-root",
            f"{at}/data",
            "--exec-root",
            f"{at}/exec",
            "--pidfile",
            f"{at}/pid",
            "-H",
            self.address,
        ]
        with open(at / "log", "ab") as log:
            hide = 'mount -t tmpfs none "$0" && exec dockerd --bridge none --iptables=false "$@"'
            self._program = subprocess.Popen(
                ["unshare", "--net", "--mount", "sh", "-c", hide, str(self._hidden), *own],
                stderr=log,
                start_new_session=True,
            )
        asked = ["docker", "--host", self.address, "version"]
        while subprocess.run(asked, capture_output=True, check=False).returncode != 0:
            assert self._program.poll() is None, (at / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        self._program.terminate()
        self._program.wait()


@contextmanager
def own_daemon(hidden: Path | None = None) -> Iterator[Daemon]:
    # A socket's path must be short.
    directory = Path(tempfile.mkdtemp(prefix="hermitcrab-", dir="/tmp"))
    daemon = Daemon(directory, hidden)
    try:
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(directory)
