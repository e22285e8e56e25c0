r"""The bash text that does an agent's work in a sandbox where there is none. Pure functions.

Everything is bash's own builtins, because an image may hold nothing else, and travels through stdin: an argv
can be read by anybody. Our own words on a stream, among whatever the program writes, begin with a NUL and a
nonce that only we know: `\0NONCE word ...\n`, short enough to be one atomic write.

What an exec starts is known by a mark that it inherits, whatever it does: its soft limit of file locks, which
the kernel has ignored for twenty years. Unlike a variable it survives `env -i` and shows nowhere. Where it
cannot be set or seen (gVisor), what a process holds open tells whose it is, as long as it holds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hermitcrab.agent.wire import Fd, FdKind, Start
from hermitcrab.core.quoting import quote

# Privileged mode: no functions, options or start-up files from the environment. `read` takes exactly what it
# is told to from a pipe, so the rest of stdin is left to whoever comes next.
FAR_END = ("bash", "-pc", 'read -r && LC_ALL=C read -rN "$REPLY" && eval "$REPLY"')
"""What is run in the sandbox: it takes its program from its stdin."""

MARKS = 1 << 22
"""How many marks one link has to give."""
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")
_CHUNK = 800

# $1 to $2 are the marks; a $3 is sent to each marked process as soon as it is seen, because a quick one may
# have forked and gone when the search is over. One that went before it could be looked at may have been ours
# too, so whoever came meanwhile is looked at as well. A descendant that raised its limit is found as such.
# Without marks, $4 is the wrapper, $5 the program, and 1:4 says that descriptor 1 is the wrapper's 4.
# A regular expression, because ${l#*...} takes bash half a millisecond, and there may be hundreds of them.
_SEEK = r"""
holds () {
  local pair
  [[ $p == "$5" ]] && return
  for pair in "${@:6}"; do [[ $d/fd/${pair%:*} -ef /proc/$4/fd/${pair#*:} ]] && return; done
  return 1
}
seek () {
  local LC_ALL=C locks='Max file locks +([0-9]+)' d p s l f round more=1; local -A seen=() up=() ours=()
  for round in {1..50}; do
    more=0
    for d in /proc/[0-9]*; do
      p=${d#/proc/}
      [[ ! ${seen[$p]-} ]] || continue
      s= l=
      IFS= read -r -d '' s <$d/stat
      s=${s##*) }
      case $s in '') more=1; continue;; [ZX]*) more=1 seen[$p]=1; continue;; esac
      IFS= read -r -d '' l <$d/limits
      f=($s) up[$p]=${f[1]} seen[$p]=1
      if [[ $l =~ $locks ]] && ((BASH_REMATCH[1] >= $1 && BASH_REMATCH[1] <= $2)) ||
         { (($# > 4)) && holds "$@"; }; then
        ours[$p]=1; ${3:+kill -$3 $p}
      fi
    done
    ((more)) || break
  done
  more=1
  while ((more)); do
    more=0
    for p in "${!up[@]}"; do
      if [[ ${ours[${up[$p]}]-} && ! ${ours[$p]-} ]]; then ours[$p]=1 more=1; ${3:+kill -$3 $p}; fi
    done
  done
  found=("${!ours[@]}"); ((${#found[@]}))
}
"""

# Sleeping without a program: a read from a pipe that nobody writes to, but for the one line with which
# `wrapper` lets its program begin.
_NAP = "exec {never}<> <(:)\nnap () { read -r -t $1 -u $never; }\n"

# TERM, the grace ($3 in ms), then STOP and KILL until none is left. Nobody tells a stranger of a process's
# end, so this has to look again and again, and on a busy machine a look may take longer than a nap: before
# bash 5, which has no clock, the naps alone are counted. Fails when something could not be ended.
_FINISH = r"""
now () { ms=$((${EPOCHREALTIME:+${EPOCHREALTIME/[.,]/} / 1000} + 0)); }
finish () {
  local LC_ALL=C t=0 tries=0 ms began naps=0
  seek $1 $2 TERM "${@:4}" || return 0
  now; began=$ms
  while ((t < $3)); do
    if ((t < 200)); then nap 0.02; naps=$((naps + 25)); else nap 0.1; naps=$((naps + 110)); fi
    seek $1 $2 '' "${@:4}" || return 0
    now; t=$((ms ? ms - began : naps))
  done
  while seek $1 $2 STOP "${@:4}"; do
    seek $1 $2 KILL "${@:4}" || return 0
    ((tries++ < 100)) || return 1
    if kill -KILL "${found[@]}"; then nap 0.01; else nap 0.1; tries=$((tries + 20)); fi
  done
  return 0
}
"""


def message(program: bytes) -> bytes:
    """A program as `FAR_END` takes it."""
    return b"%d\n%s" % (len(program), program)


def keeper(nonce: bytes, first: int, lease: int) -> bytes:
    """The one that stays: evaluates what it is sent, line by line, and ends every exec when its input ends,
    or when nothing comes for as long as the lease."""
    return (
        "exec 3<&0 4>&1 </dev/null >/dev/null 2>&1\n"
        + _NAP
        + _SEEK
        + _FINISH
        + rf"""
printf '\0%s ready %s\n' {nonce.decode()} "$HOSTTYPE" >&4
while IFS=' ' read -r -t {lease} -u 3 id text; do
  case $id in [0-9]*) (eval "$text"; printf '\0%s done %s %s\n' {nonce.decode()} $id $? >&4) 3<&- & ;; esac
done
exec 3<&-
finish {first} {first + MARKS - 1} 250
"""
    ).encode()


class Unsupported(Exception):
    """A START that cannot be met here; the text says why."""


@dataclass(frozen=True)
class Plan:
    """Which channel of an exec comes by which stream of its client program."""

    stdout: int | None
    stderr: int | None
    """Between our own words."""
    files: tuple[int, ...]
    """Told at the end."""
    relayed: tuple[int, ...]
    """Those of the files for which no stream was left: they come in our words."""
    inputs: tuple[int, ...]
    """All of them read the one stdin; each has its turn when those of lower numbers are closed."""


def plan(start: Start) -> Plan:
    outputs = [fd.number for fd in start.fds if fd.kind is FdKind.OUTPUT]
    files = [fd.number for fd in start.fds if fd.kind is FdKind.FILE]
    if any(fd.kind is FdKind.TERMINAL for fd in start.fds):
        raise Unsupported("there is no terminal to be had without an agent in the sandbox")
    if len(outputs) > 2:
        raise Unsupported("more than two outputs need an agent in the sandbox")
    inputs = sorted(fd.number for fd in start.fds if fd.kind is FdKind.INPUT)
    both: list[int] = [*outputs, *files]
    return Plan(
        stdout=both[0] if both else None,
        stderr=both[1] if len(both) > 1 else None,
        files=tuple(files),
        relayed=tuple(both[2:]),
        inputs=tuple(inputs),
    )


def wrapper(start: Start, planned: Plan, nonce: bytes, mark: int) -> bytes:
    """Starts the program, waits for it, and says how it ended, although others may still hold its streams.

    It stays until the last of them is gone: an engine breaks their pipes when it goes.
    """
    free = iter(number for number in range(3, 200) if all(fd.number != number for fd in start.fds))
    stdin, stdout, stderr = next(free), next(free), next(free)
    contents = {fd.number: (next(free), fd.content) for fd in start.fds if fd.kind is FdKind.CONTENT}
    relays = {number: next(free) for number in planned.relayed}
    held: dict[int | None, int] = {planned.stdout: stdout, planned.stderr: stderr}
    held.update(relays.items())
    pairs = " ".join(f"{number}:{own}" for number, own in held.items() if number is not None)
    held.update(dict.fromkeys(planned.inputs, stdin))
    held.update((number, own) for number, (own, _) in contents.items())
    own = [stdin, stdout, stderr, *relays.values(), *(number for number, _ in contents.values())]

    def say(words: str, to: int = stderr) -> str:
        return f"""printf '\\0%s %s\\n' {nonce.decode()} "{words}" >&{to}\n"""

    parts: list[bytes | str] = [
        f"exec {stdin}<&0 {stdout}>&1 {stderr}>&2 </dev/null >/dev/null 2>&1\n",
        say("begin", stdout),
        say("begin"),
        refusals(start, say),
        *(_content(own, content) for own, content in contents.values()),
        _RELAY % {"nonce": nonce.decode(), "chunk": _CHUNK} if relays else "",
        *(f"exec {own}> >(relay {number} >&{stderr}); relays+=($!)\n" for number, own in relays.items()),
        "" if start.inherit_env else "mapfile -t exported < <(compgen -e)\n",
        # Marked while it forks, so that there is no moment in which the program runs unmarked. Job control
        # gives it a process group of its own and spares it ignored signals. It begins when that is off again:
        # until then bash takes a program that stops for one that ended.
        _NAP + f"ulimit -S -x {mark} || unmarked=1\nset -m\n(\nread -r -u $never; exec {{never}}<&-\n",
        environment(start),
        descriptors(start.fds, held, own),
        b"exec -a " + b" ".join([quote(start.argv[0]), b"--", *map(quote, command(start))]),
        "\n) &\nset +m\nulimit -S -x hard\necho >&$never\n",
        _closed(stdin, *(number for number, _ in contents.values())),
        f"others=${{unmarked:+$$ $! {pairs}}}\n",
        say("pid $$ $others"),
        "wait $!\nstatus=$?\ntrap '' PIPE\n",
        *(f"printf '\\0%s\\0' {nonce.decode()} >&{number}; exec {number}>&-\n" for number in relays.values()),
        'wait "${relays[@]}"\n' if relays else "",
        say("end $status", stdout),
        say("end $status"),
        _SEEK,
        f"pause=0.2\nwhile seek {mark} {mark} '' $others; do nap $pause; pause=2; done\n",
    ]  # fmt: skip
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)


def _closed(*numbers: int) -> str:
    return "exec" + "".join(f" {number}<&-" for number in numbers) + "\n"


def command(start: Start) -> Sequence[bytes]:
    return [start.program or start.argv[0], *start.argv[1:]]


def refusals(start: Start, say: Callable[[str], str]) -> bytes:
    """What ends the attempt before it began."""
    program = quote(command(start)[0])
    path = next((entry[5:] for entry in start.env if entry.startswith(b"PATH=")), None)
    no_directory, unusable, missing = (say(f"no {why}").encode() for why in ("directory", "126", "127"))
    return (
        b"cd -P -- %s || { %s exit; }\n" % (quote(start.cwd), no_directory) if start.cwd else b""
    ) + b"%stype -P -- %s || { if [[ %s == */* && -e %s ]]; then %s else %s fi; exit; }\n" % (
        b"" if path is None else b"PATH=%s " % quote(path), program, program, program, unusable, missing
    )  # fmt: skip


def refusal(start: Start, why: str) -> tuple[int, str]:
    """The code and the reason for a `no`."""
    program = command(start)[0].decode(errors="replace")
    match why:
        case "directory":
            return 126, f"cannot enter {start.cwd.decode(errors='replace')}"
        case "127":
            return 127, f"{program}: No such file or directory"
    return 126, f"{program}: it cannot be executed"


def _content(own: int, content: bytes) -> bytes:
    if b"\0" in content:
        raise Unsupported("a descriptor whose content has a NUL byte needs an agent in the sandbox")
    return b"exec %d< <(printf %%s %s)\n" % (own, quote(content))


def environment(start: Start) -> bytes:
    """What `exec` will pass on. A search path of the sandbox's own is used, but not passed on."""
    for entry in start.env:
        if not _NAME.fullmatch(entry.partition(b"=")[0]):
            raise Unsupported(
                "bash cannot pass on a variable of that name: " + repr(entry.partition(b"=")[0])
            )
    clear = b"" if start.inherit_env else b'path=$PATH; unset -v "${exported[@]}"; PATH=$path\n'
    words = [name + b"=" + quote(value) for name, _, value in (entry.partition(b"=") for entry in start.env)]
    return clear + (b"export " + b" ".join(words) + b"\n" if words else b"")


def descriptors(fds: Sequence[Fd], held: dict[int | None, int], own: Sequence[int]) -> bytes:
    words: list[str] = []
    for fd in fds:
        match fd.kind:
            case FdKind.NULL:
                words.append(f"{fd.number}<>/dev/null")
            case FdKind.SAME:
                words.append(f"{fd.number}<&{fd.content[0]}")
            case _:
                words.append(f"{fd.number}<&{held[fd.number]}")
    return ("exec " + " ".join([*words, *(f"{number}<&-" for number in own)]) + "\n").encode()


# Collects what is written until our own last word, then tells it in lines that are atomic writes: the
# program's stderr is on the same stream, and a background process may be writing there at any time. Such a
# process can spoil the file, which it holds as with any agent, but cannot say a word of ours.
_RELAY = r"""
relay () {
  local LC_ALL=C piece text= at
  while IFS= read -r -d '' piece && [[ $piece != %(nonce)s ]]; do
    piece=${piece//\\/\\\\}; text+=${piece//$'\n'/\\n}'\0'
  done
  text=${text%%'\0'}
  for ((at = 0; at < ${#text}; at += %(chunk)d)); do
    printf '\0%%s file %%s %%s\n' %(nonce)s $1 "${text:at:%(chunk)d}"
  done
  printf '\0%%s last %%s\n' %(nonce)s $1
}
"""
