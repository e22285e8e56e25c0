"""A sandbox for tests of the sync that is a directory, and fails when it is told to."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace

from hermitcrab.core.state import ShellState
from hermitcrab.errors import TransferError
from hermitcrab.files import tar
from hermitcrab.files.entries import FileInfo
from hermitcrab.files.manifest import stamp_at
from hermitcrab.files.tools import NotThere


class DirectoryFiles:
    """What `AsyncFiles` offers to the sync, done to a directory of this machine."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}
        """Call -> after how many entries it fails, once."""
        self.unheard = False
        """What is unpacked arrives, but nobody hears of it."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Done once, while something is packed."""
        self._session = SimpleNamespace(state=ShellState(cwd="/"))

    async def walk(self, path: str = "") -> AsyncGenerator[FileInfo, None]:
        budget = self._begin("walk")
        top = self._place(path)
        if not top.is_dir():
            raise NotThere(f"cannot list {path}: No such file or directory")
        for directory, directories, files in os.walk(top):
            for name in (*directories, *files):
                budget()
                place = Path(directory, name)
                yield _info(place, str(place.relative_to(top)))

    async def stat(self, path: str, *, follow: bool = True) -> FileInfo:
        self._begin("stat")()
        if not _exists(self._place(path)):
            raise NotThere(f"cannot stat {path}")
        return _info(self._place(path), path)

    async def pack(
        self, path: str, names: Iterable[str] | None = None, exclude: object = ()
    ) -> AsyncGenerator[bytes, None]:
        budget = self._begin("pack")
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()
        for name in names or ():
            budget()
            place = self._place(path) / name
            if _exists(place):
                buffer = io.BytesIO()
                with tarfile.open(fileobj=buffer, mode="w") as archive:
                    archive.add(place, name, recursive=False)
                    yield buffer.getvalue()[: archive.offset]
        yield tar.END

    async def unpack(self, path: str, chunks: AsyncIterable[bytes], *, owners: bool = False) -> None:
        budget = self._begin("unpack")
        data = b"".join([chunk async for chunk in chunks])
        top = self._place(path)
        top.mkdir(parents=True, exist_ok=True)
        # Python's own keeps whole seconds only.
        times = {each.path: each.mtime_ns for each in tar.Reader().feed(data) if isinstance(each, tar.Entry)}
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            if hasattr(tarfile, "fully_trusted_filter"):  # since 3.11.4
                archive.extraction_filter = tarfile.fully_trusted_filter
            for member in archive:
                budget()
                if not member.isdir() and (top / member.name).is_dir():
                    raise TransferError(f"{member.name}: in its place is a directory")
                archive.extract(member, top)
                if member.isfile():
                    now = times[os.fsencode(member.name)]
                    os.utime(top / member.name, ns=(now, now))
        if self.unheard:
            raise TransferError("the answer was lost")

    async def remove_many(self, path: str, names: Iterable[str]) -> None:
        budget = self._begin("remove_many")
        for name in names:
            budget()
            place = self._place(path) / name
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)
        budget()

    def _begin(self, call: str) -> Callable[[], None]:
        self.calls.append(call)
        left = self.fails.pop(call, -1)

        def spend() -> None:
            nonlocal left
            if left == 0:
                raise TransferError(f"{call} failed, as it was told to")
            left -= 1

        return spend

    def _place(self, path: str) -> Path:
        return self.root / path.lstrip("/")


def _exists(place: Path) -> bool:
    return os.path.lexists(place)


def _info(place: Path, path: str) -> FileInfo:
    status, stamp = os.lstat(place), stamp_at(place)
    assert stamp is not None
    return FileInfo(
        path,
        stamp.kind,  # type: ignore[arg-type]
        status.st_size,
        status.st_mode & 0o7777,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        stamp.target,
    )
