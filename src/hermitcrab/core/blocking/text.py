r"""The bash text that runs one program within one call, and tells its end and its files. Pure functions.

Our words are lines `NONCE word ...` in the call's output, each short enough to be one atomic write. What must
be exact is told with `printf %q`, which is plain ASCII. What a program reads, and what it leaves to be told,
are files that nobody else may open and that `rm` unlinks before the program starts, which would see them.
Forks are what takes time here, so that there are as few as possible.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hermitcrab.agent.wire import FdKind, Start
from hermitcrab.core.plain import text as plain
from hermitcrab.core.plain.text import FAR_END, Unsupported
from hermitcrab.core.quoting import quote

LARGE = 4 << 20
"""Bytes that are too many for one answer."""
_SMALL = 1 << 14
"""Bytes that are no text are spelled out up to this size, and go through `base64` beyond it."""

# With no fork for the mask, where the kernel tells it.
_BEGIN_FILES = """for d in "${TMPDIR:-/tmp}" /dev/shm /var/tmp .; do [[ -d $d && -w $d ]] && break; done
d+=/.hermitcrab-%(token)s
{ read -r; read -r mask mask; } </proc/self/status; [[ $mask == 0* ]] || mask=$(umask)
umask 077; set -C
"""
_END_FILES = """umask $mask; set +C
rm -f -- %(names)s %(in)d<&- %(out)d>&-
"""

# A pipe without a program. Both of its ends are opened anew, because the first descriptor has both in one.
_PIPE = """pipe () {
  eval "exec $1<>"' <(:)' && eval "exec $2>/proc/self/fd/$1 $3</proc/self/fd/$1" && eval "exec $1>&-"
}
"""

# $1 is closed when the program $2 that reads from $3 is over. When somebody else still writes, what came so
# far is passed on; then it is read and dropped, so that whoever writes goes on.
_SETTLE = """settle () {
  read -r -t 0.1 -u $1; (($? > 128)) || return
  local n
  for n in {1..100}; do read -t 0 -u $3 || break; read -r -t 0.02 -u $1; done
  read -r -t 0.02 -u $1
  kill -KILL $2
  cat <&$3 %(in)d<&- %(out)d>&- &
}
"""

# A file's content, in pieces: NUL ends each but the last, so a last one is added to be taken off. Where its
# writers are in the file is how much they wrote.
_TELL = r"""tell_little () {
  local parts text at
  printf . >&$3
  mapfile -d '' -t parts <&$2
  printf -v text ' %%q' "${parts[@]}"
  for ((at = 0; at < ${#text}; at += 3000)); do printf '%(nonce)s file %%s %%s\n' $1 "${text:at:3000}"; done
  printf '%(nonce)s last %%s\n' $1
}
tell () {
  local size=
  read -r size size </proc/self/fdinfo/$3
  if [[ $size ]] && ((size < 65536)); then tell_little $1 $2 $3
  elif ((%(stores)d && size > %(large)d)); then
    (umask 077; cat <&$2 >"$d-$1-large") && printf '%(nonce)s stored %%s %%s\n' $1 "$d-$1-large"
  elif type -P base64 >/dev/null; then
    printf '%(nonce)s coded %%s\n' $1; base64 <&$2; printf '%(nonce)s decoded %%s\n' $1
  else tell_little $1 $2 $3; fi
}
"""

# The names that the environment has, which are unset for a program that gets another.
_EXPORTED = "mapfile -t exported < <(compgen -e)\n"
_EXPORTED_BY_FILE = """compgen -e >|"$d-%(file)d"; mapfile -t exported <"$d-%(file)d"
"""

# What passes output on goes on to do so when everything is being ended, and is not the program's.
_SPARED = "HUP INT QUIT USR1 USR2 TERM"
_RELAY = "HERMITCRAB_RELAY"

# Everything that descends from the wrapper of that name, but for our own.
_SIGNAL = r"""
name=%(name)s; declare -A up=() ours=()
for d in /proc/[0-9]*; do
  p=${d#/proc/} s= c=()
  IFS= read -r -d '' s <$d/stat; s=${s##*) }; f=($s); up[$p]=${f[1]-}
  mapfile -d '' -t c <$d/cmdline
  if [[ "${c[*]}" == *"$name"* ]]; then ours[$p]=1 top=$p; fi
done 2>/dev/null
more=1
while ((more)); do
  more=0
  for p in "${!up[@]}"; do
    if [[ ${up[$p]} && ${ours[${up[$p]}]-} && ! ${ours[$p]-} ]]; then ours[$p]=1 more=1; fi
  done
done
for p in "${!ours[@]}"; do
  e=(); mapfile -d '' -t e </proc/$p/environ
  [[ $p == "${top-}" || " ${e[*]} " == *" %(relay)s=1 "* ]] || kill -%(signal)d $p
done 2>/dev/null
"""


@dataclass(frozen=True)
class Plan:
    """By which way each channel of an exec comes and goes."""

    spoken: int | None
    """Printed between our words."""
    relayed: bool
    """What is spoken passes through a program, so that whoever holds it does not hold the call."""
    collected: tuple[int, ...]
    """Other outputs, told at the end."""
    files: tuple[int, ...]
    """Told at the end, too."""
    much: bool
    """What is collected may be large."""
    inputs: tuple[int, ...]
    """The last of them is the call's own stdin."""


def plan(start: Start, *, waits_for_output: bool) -> Plan:
    if any(fd.kind is FdKind.TERMINAL for fd in start.fds):
        raise Unsupported("there are no terminals here")
    outputs = [fd.number for fd in start.fds if fd.kind is FdKind.OUTPUT]
    files = tuple(fd.number for fd in start.fds if fd.kind is FdKind.FILE)
    # A program that leaves no file behind is one of our own, whose every byte counts; a shell is to be seen
    # while it runs, and its last words are a file.
    spoken = outputs[0] if outputs and files else None
    return Plan(
        spoken=spoken,
        relayed=spoken is not None and waits_for_output,
        collected=tuple(each for each in outputs if each != spoken),
        files=files,
        much=not files,
        inputs=tuple(sorted(fd.number for fd in start.fds if fd.kind is FdKind.INPUT)),
    )


def command(name: str, *, in_bash: bool) -> str:
    """What the call runs: a shell that takes its program from its stdin, and can be found by that name."""
    shell, option, program = FAR_END
    return f": {name}; {program}" if in_bash else f"exec {shell} {option} '{program}' {name}"


def signalling(name: str, number: int) -> bytes:
    """The program that sends a signal to everything that the call of that name started."""
    return plain.message((_SIGNAL % {"name": name, "signal": number, "relay": _RELAY}).encode())


def stdin(
    start: Start,
    planned: Plan,
    nonce: bytes,
    given: Mapping[int, bytes],
    *,
    staged: bytes = b"",
    takes_bytes: bool,
    stores: bool = False,
) -> bytes:
    """All that a call is given: our text, what that text reads into files, and the program's own stdin.

    `staged` is the path of a file that is the program's stdin instead, and is removed. With `stores`, output
    of our own programs that is large is left in a file.
    """
    contents = {fd.number: fd.content for fd in start.fds if fd.kind is FdKind.CONTENT}
    contents |= {channel: given[channel] for channel in planned.inputs[:-1]}
    own = given[planned.inputs[-1]] if planned.inputs and not staged else b""
    read = [data for data in contents.values() if data and passes(data, takes_bytes=takes_bytes)]
    coded = not (takes_bytes or passes(own, takes_bytes=False))

    def opened(in_: int, out: int, say: Callable[[str], str]) -> bytes:
        if staged:
            return b"exec %d<%s || { %s exit; }\nrm -f %s\n" % (in_, staged, say("no input").encode(), staged)
        return _decoded(own, in_, out, say) if coded else b""

    script = _wrapper(start, planned, nonce, contents, opened, takes_bytes=takes_bytes, stores=stores)
    return b"".join([plain.message(script), *read, own if not coded else _coded(own)])


def passes(data: bytes, *, takes_bytes: bool) -> bool:
    """Whether bash can read it, and the call carry it, as it is."""
    if b"\0" in data:
        return False
    if takes_bytes:
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _coded(own: bytes) -> bytes:
    from base64 import encodebytes  # few need it

    return b"" if len(own) <= _SMALL else encodebytes(own)


def _wrapper(
    start: Start,
    planned: Plan,
    nonce: bytes,
    contents: Mapping[int, bytes],
    opened: Callable[[int, int, Callable[[str], str]], bytes],
    *,
    takes_bytes: bool,
    stores: bool,
) -> bytes:
    taken = {fd.number for fd in start.fds}
    free = iter(number for number in range(3, 250) if number not in taken)
    in_, out = next(free), next(free)
    given = {number: next(free) for number in contents}
    kept = {number: _Kept(next(free), next(free)) for number in (*planned.files, *planned.collected)}
    relays = [
        _Relay(number, kept[number].write if number in kept else out, free) for number in _passed_on(planned)
    ]
    held: dict[int | None, int] = {planned.spoken: out}
    held |= {number: kept[number].write for number in planned.files}
    held.update(given.items())
    held |= {each.channel: each.write for each in relays}
    if planned.inputs:
        held[planned.inputs[-1]] = in_
    own = [in_, out, *given.values()]
    own += [each for one in kept.values() for each in one] + [each for one in relays for each in one.own]

    def say(words: str) -> str:
        return f"""printf '%s %s\\n' {nonce.decode()} "{words}" >&{out}\n"""

    words = {"nonce": nonce.decode(), "in": in_, "out": out, "stores": stores, "large": LARGE}
    parts: list[bytes | str] = [
        f"exec {in_}<&0 {out}>&1 </dev/null >/dev/null 2>&1\ntrap : TERM INT HUP\n",
        say("begin"),
        plain.refusals(start, say),
        *_files(contents, given, kept, start, words, say, takes_bytes=takes_bytes),
        opened(in_, out, say),
        _PIPE + _SETTLE % words if relays else "",
        *(each.begin(out, relays, say) for each in relays),
        # In the foreground, so that it ignores no signals; ours are handled when it has ended.
        "(\n",
        plain.environment(start),
        plain.descriptors(start.fds, held, own),
        b"exec -a " + b" ".join([quote(start.argv[0]), b"--", *map(quote, plain.command(start))]),
        "\n)\nstatus=$?\ntrap '' PIPE\nLC_ALL=C\n",
        *(f"exec {each.write}>&-\n" for each in relays),
        *(f"settle {each.over} ${{relay{each.channel}}} {each.read}\n" for each in relays),
        say("end $status"),
        _TELL % words if kept else "",
        *(
            f"tell {number} {each.read} {each.write} >&{out}\n"
            for number, each in kept.items()
        ),
        say("done"),
    ]  # fmt: skip
    return b"".join(part if isinstance(part, bytes) else part.encode() for part in parts)


class _Kept(NamedTuple):
    """The two descriptors of a file that is told at the end."""

    write: int
    read: int


def _files(
    contents: Mapping[int, bytes],
    given: Mapping[int, int],
    kept: Mapping[int, _Kept],
    start: Start,
    words: Mapping[str, object],
    say: Callable[[str], str],
    *,
    takes_bytes: bool,
) -> Iterator[bytes | str]:
    """Makes them, and learns what the environment has, with the help of one of them if there is any."""
    if contents or kept:
        yield _BEGIN_FILES % {"token": secrets.token_hex(8)}
    refuse = f" || {{ {say('no files')} exit; }}\n"
    for number, data in contents.items():
        if data and passes(data, takes_bytes=takes_bytes):
            yield f'LC_ALL=C read -rN {len(data)} <&{words["in"]}; printf %s "$REPLY" >"$d-{number}"' + refuse
        else:
            yield b'{ %s} >"$d-%d"' % (_spelled(data), number) + refuse.encode()
        yield f'exec {given[number]}<"$d-{number}"\n'
    if not start.inherit_env:
        yield _EXPORTED_BY_FILE % {"file": next(iter(kept))} if kept else _EXPORTED
    for number, (write, read) in kept.items():
        yield f'exec {write}>|"$d-{number}" {read}<"$d-{number}"' + refuse
    if contents or kept:
        names = " ".join(f'"$d-{number}"' for number in (*contents, *kept))
        yield _END_FILES % {"names": names, **words}


class _Relay:
    """A pipe from the program to another one, that passes on what comes."""

    def __init__(self, channel: int, to: int, free: Iterator[int]) -> None:
        self.channel, self.to = channel, to
        self.both, self.write, self.read, self.over, self._held = (next(free) for _ in range(5))

    @property
    def own(self) -> tuple[int, ...]:
        return self.write, self.read, self.over

    def begin(self, out: int, all_: list[_Relay], say: Callable[[str], str]) -> str:
        """It holds a pipe to us of which nothing comes but its end."""
        closed = " ".join(f"{each.write}>&-" for each in all_)
        to = f"{self._held}>&1 >&{self.to} {closed} {out}>&-"
        cat = f"exec {self.over}< <(trap '' {_SPARED}; {_RELAY}=1 exec cat <&{self.read} {to})\n"
        without = f"exec {self.write}>&{out}\n" if self.to == out else f"{{ {say('no cat')} exit; }}\n"
        return (
            f"pipe {self.both} {self.write} {self.read}\n"
            f"if type -P cat; then\n{cat}relay{self.channel}=$!\nelse\n{without}fi\n"
        )


def _passed_on(planned: Plan) -> Iterator[int]:
    if planned.relayed and planned.spoken is not None:
        yield planned.spoken
    yield from planned.collected


def _spelled(data: bytes) -> bytes:
    """Bash that prints exactly these bytes."""
    *parts, last = map(quote, data.split(b"\0"))
    ended = b"".join(b"printf '%%s\\0' %s\n" % part for part in parts)
    return ended + b"printf %s " + last + b"\n"


def _decoded(own: bytes, in_: int, out: int, say: Callable[[str], str]) -> bytes:
    """What the call could not carry becomes the program's stdin again."""
    if len(own) <= _SMALL:
        return b"exec %d< <(exec %d>&-\n%s)\n" % (in_, out, _spelled(own))
    return b"type -P base64 || { %s exit; }\nexec %d< <(exec base64 -d <&%d %d>&-)\n" % (
        say("no base64").encode(), in_, in_, out,
    )  # fmt: skip


def refusal(start: Start, why: str) -> tuple[int, str]:
    """The code and the reason for a `no`."""
    match why:
        case "files":
            return 126, "no directory there takes temporary files (is /tmp writable?)"
        case "input":
            return 126, "its input, which was brought there before, is gone"
        case "cat" | "base64":
            return 126, f"there is no {why} in the sandbox"
    return plain.refusal(start, why)
