"""Images for Apptainer: as they are where it can mount them, fetched and unpacked once where it cannot."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hermitcrab.backends.apptainer.program import IMAGES, NAME, Installation, plain, wrong
from hermitcrab.backends.progress import run_shown
from hermitcrab.errors import SandboxStartError

_ARCHIVE = re.compile(r"(docker-archive|oci-archive|oci):(.+)")
_REMOTE = re.compile(r"(docker|oras|library|shub)://.+|docker-daemon:.+")
_MOUNTABLE = ((32, b"SIF_MAGIC"), (0, b"hsqs"))
_TAR = (257, b"ustar")
_log = logging.getLogger(__name__)


def ready(image: str, installation: Installation) -> str:
    """The path that Apptainer can start from at once. Waits while an image is fetched and unpacked."""
    archive = _ARCHIVE.fullmatch(image)
    if archive is not None:
        path = _existing(archive[2], image)
        return str(_unpacked(archive[1], path, installation))
    path = _pulled(image, installation) if _REMOTE.fullmatch(image) else _existing(image, image)
    if path.is_dir():
        return str(_root_file_system(path))
    if not _is(path, *_MOUNTABLE):
        advice = f"docker-archive:{path} would be what `docker save` writes" if _is(path, _TAR) else IMAGES
        raise wrong("image", image, f"which is no image; {advice}")
    return str(path if installation.mounts_files else _unpacked("localimage", path, installation))


def _existing(given: str, image: str) -> Path:
    try:
        path = Path(given).expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise wrong("image", image, f"which cannot be found ({error}); {IMAGES}") from error
    if "\n" in str(path):
        raise wrong("image", image, "takes no line break")
    if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
        raise wrong("image", image, "which your user may not read")
    return path


def _root_file_system(path: Path) -> Path:
    # Apptainer mounts over these, and makes none of them.
    missing = [name for name in ("dev", "proc", "tmp") if not (path / name).is_dir()]
    if missing:
        raise wrong("image", path, f"a directory without {', '.join(missing)}; {IMAGES}")
    return path


def _is(path: Path, *kinds: tuple[int, bytes]) -> bool:
    with path.open("rb") as file:
        start = file.read(512)
    return any(start[offset:].startswith(magic) for offset, magic in kinds)


def _pulled(image: str, installation: Installation) -> Path:
    def pull(target: Path) -> None:
        _run([installation.program, "pull", str(target), image], f"image {image!r} cannot be pulled")

    return _once(f"{_key(image)}.sif", pull)


def _unpacked(kind: str, file: Path, installation: Installation) -> Path:
    # Else what the image's owner may not write or enter could never be removed by an ordinary user.
    fix = [] if os.geteuid() == 0 else ["--fix-perms"]

    def build(target: Path) -> None:
        # A file that is named itself, and is no sound image, would be taken for such a recipe and be run.
        recipe = target.with_suffix(".recipe")
        recipe.write_text(f"Bootstrap: {kind}\nFrom: {file}\n")
        words = [installation.program, "build", "--sandbox", *fix, str(target), str(recipe)]
        try:
            _run(words, f"image {str(file)!r} cannot be unpacked")
        finally:
            recipe.unlink()

    status = file.stat()
    return _once(_key(f"{kind} {file} {status.st_size} {status.st_mtime_ns} {status.st_ino}"), build)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:32]


def _once(name: str, make: Callable[[Path], None]) -> Path:
    """What is in the store under that name, made first when it is not; whoever comes meanwhile waits."""
    # Imported here: only these images need it.
    import platformdirs

    store = platformdirs.user_cache_path("hermitcrab") / NAME / "images"
    target = store / name
    if not target.exists():
        store.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(store / f"{name}.lock"):
            if not target.exists():
                part = store / f"{name}.part"
                _remove(part)
                try:
                    make(part)
                    part.rename(target)
                finally:
                    _remove(part)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(words: list[str], failure: str) -> None:
    _log.info("%s", " ".join(words[1:]))
    status, said = run_shown(words, _log)
    if status != 0:
        raise SandboxStartError(f"{failure}: {plain(said) or f'it ended with {status}'}", backend=NAME)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
