"""Files without an agent: through the sandbox's own `cat`, or bash alone where it has none."""

from __future__ import annotations

import asyncio

from hermitcrab.agent.wire import Cause, Exit, Fd, FdKind, Start
from hermitcrab.core.plain.execs import PlainExec
from hermitcrab.core.protocols import STDERR, STDIN, STDOUT
from hermitcrab.core.quoting import quote

# Bash drops NUL bytes unless they are what it reads up to.
_COPY = """
copy () {
  if type -P cat >/dev/null; then cat; return; fi
  local LC_ALL=C piece
  while IFS= read -r -d '' piece; do printf '%s\\0' "$piece" || return; done
  printf %s "$piece"
}
no () { printf %s "$1" >&2; exit 1; }
need () { for each; do type -P $each >/dev/null || no "there is no $each in the sandbox"; done; }
regular () {
  [[ ! -d $1 ]] || no 'Is a directory'
  [[ -f $1 || ! -e $1 ]] || no 'Not a regular file'
}
"""
_READ = """
path=$1 offset=$2 most=$3
[[ -e $path ]] || no 'No such file or directory'
regular "$path"
[[ -r $path ]] || no 'Permission denied'
exec <"$path" || no 'cannot be opened'
if ((offset || most)); then
  need head tail
  tail -c +$((offset + 1)) | if ((most)); then head -c $most; else copy; fi
  exit 0
fi
copy || no 'cannot be read'
"""
# It leaves the new content beside the file and says where: whoever lost us halfway must not take half of it
# for the whole, so the last step is another request.
_WRITE = """
path=$1 mode=$2 parents=$3
need mv chmod
if [[ -L $path ]]; then
  need readlink
  path=$(readlink -f -- "$path" && echo .) || no 'a link to nowhere'
  path=${path%$'\\n'.}
fi
regular "$path"
[[ $path == */* ]] || path=./$path
directory=${path%/*}/
if ((parents)) && [[ ! -d $directory ]]; then
  need mkdir
  mkdir -p -- "$directory" || no 'No directory can be made there'
fi
[[ -d $directory ]] || no 'No such file or directory'
[[ -w $directory ]] || no 'Permission denied'
if [[ ! $mode && -e $path ]]; then need stat; mode=$(stat -c %a -- "$path"); fi
new=$directory.hermitcrab-$BASHPID-$RANDOM
set -C
if ! { copy >"$new" && if [[ $mode ]]; then chmod $mode "$new"; fi; } 2>/dev/null; then
  need rm
  rm -f -- "$new"
  no 'it cannot be written'
fi
printf '%s\\0%s' "$new" "$path" >&2
"""


class FileExec(PlainExec):
    """An exec whose stderr is the reason of its failure."""

    def _told_files(self) -> list[bytes]:
        return []

    def _exit(self) -> Exit:
        exit_ = super()._exit()
        if exit_.cause is Cause.ENDED and exit_.code != 0:
            reason = self._files[STDERR].decode(errors="replace").strip()
            return Exit(Cause.NOT_STARTED, 126, reason=reason or f"it ended with {exit_.code}")
        return exit_


class Replacement(FileExec):
    """A new content for a file, which takes the old one's place when all of it is there."""

    _moved: asyncio.Future[int] | None = None

    def _end_if_over(self) -> None:
        if self._status == 0 and not self._unfinished and self._moved is None and self._cause is Cause.ENDED:
            new, _, path = bytes(self._files[STDERR]).partition(b"\0")
            self._moved = self._host.loop.create_future()
            self._moved.add_done_callback(lambda _: self._end_if_over())
            self._host.ask((b"mv -f -- %s %s" % (quote(new), quote(path))).decode(), self._moved)
        elif self._moved is None or self._moved.done():
            super()._end_if_over()

    def _exit(self) -> Exit:
        if self._moved is not None and not self._moved.cancelled() and self._moved.result() != 0:
            return Exit(Cause.NOT_STARTED, 126, reason="it could not be put in its place")
        return super()._exit()


def reading(path: bytes, offset: int, most: int) -> Start:
    return _start(_READ, [path, b"%d" % offset, b"%d" % most], Fd(STDIN, FdKind.NULL))


def writing(path: bytes, mode: int, *, parents: bool) -> Start:
    octal = b"%o" % mode if mode else b""
    return _start(_WRITE, [path, octal, b"%d" % parents], Fd(STDIN, FdKind.INPUT))


def _start(script: str, arguments: list[bytes], stdin: Fd) -> Start:
    return Start(
        argv=[b"bash", b"-pc", (_COPY + script).encode(), b"bash", *arguments],
        fds=[stdin, Fd(STDOUT, FdKind.OUTPUT), Fd(STDERR, FdKind.FILE)],
        inherit_env=True,
    )
