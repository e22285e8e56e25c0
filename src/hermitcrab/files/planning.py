"""What a sync has to do, from what both sides have and what they last agreed on. Pure.

Each name is judged by three versions: the host's, the sandbox's, and the one that both had when they last
agreed. A side that differs from the agreement has changed. Where only one has, the other follows; where both
have, nothing is overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from hermitcrab.files.manifest import DIRECTORY, FILE, LINK, NEVER, Scan, Stamp

_SECOND = 10**9


@dataclass(frozen=True)
class Agreed:
    """One name as both sides had it when they last agreed."""

    here: Stamp
    there: Stamp
    """As it was sent, without ctime and inode, until it was looked at for the first time."""
    ours: frozenset[bytes] = frozenset()
    """Digests of what the host sent: a sandbox that holds one of these has changed nothing."""
    young: bool = False
    """The host's stamp was so fresh that an edit may have left the same: its content has to be compared."""
    parted: bool = False
    """Both have changed it. It is left alone on both sides until it can be brought beside the host's."""


Agreement = Mapping[str, Agreed]


class Changes(NamedTuple):
    """What the host did since the agreement."""

    changed: tuple[str, ...]
    gone: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.gone)


@dataclass(frozen=True)
class PushPlan:
    """What has to happen in the sandbox."""

    uploads: tuple[str, ...] = ()
    """A directory before what is in it."""
    removals: tuple[str, ...] = ()
    """What is in a directory before it."""
    replaced: tuple[str, ...] = ()
    """Uploads that are removed first: a directory in the place of a file, or a file in that of one."""
    parted: tuple[str, ...] = ()
    """Changed on both sides: the sandbox's stays."""
    forgotten: tuple[str, ...] = ()
    """Gone on the host; and in the sandbox it is gone too, or no longer ours."""
    adopted: tuple[str, ...] = ()
    """The sandbox has it already, as it would be sent."""


def content_digest(stamp: Stamp) -> bytes:
    """Of what has its content in its stamp: a link or a directory."""
    return hashlib.sha256(f"{stamp.kind}\0{stamp.target}".encode(errors="surrogateescape")).digest()


def sent(stamp: Stamp) -> Stamp:
    """What the sandbox should have after this was sent. Its own inode and ctime are not known yet."""
    return stamp._replace(ctime_ns=0, inode=0)


def same_there(expected: Stamp, found: Stamp) -> bool:
    """Whether what the sandbox has is what it had."""
    if expected.kind == DIRECTORY:
        return found.kind == DIRECTORY
    if expected.inode or expected == NEVER:
        return expected == found
    if expected.kind == LINK:
        return (found.kind, found.target) == (LINK, expected.target)
    # Some tools keep a time to the second only.
    unit = 1 if found.mtime_ns % _SECOND else _SECOND
    return sent(found)._replace(mtime_ns=0) == expected._replace(mtime_ns=0) and (
        found.mtime_ns // unit == expected.mtime_ns // unit
    )


def suspects(scan: Scan, agreement: Agreement) -> list[str]:
    """Names whose content must be compared, because the stamp cannot tell."""
    return [
        name
        for name, agreed in agreement.items()
        if agreed.young and agreed.here.kind == FILE and scan.stamps.get(name) == agreed.here
    ]


def changed_here(name: str, stamp: Stamp | None, agreed: Agreed, digests: Mapping[str, bytes]) -> bool:
    """Whether the host's version is another one than was agreed on."""
    if stamp != agreed.here:
        return True
    return agreed.young and name in digests and digests[name] not in agreed.ours


def host_changes(scan: Scan, agreement: Agreement, digests: Mapping[str, bytes]) -> Changes:
    """What was edited, made and removed on the host. `digests` has those of the suspects."""
    stamps = scan.stamps
    changed = [
        name
        for name, stamp in stamps.items()
        if (agreed := agreement.get(name)) is None
        or ((agreed.here != stamp or agreed.young) and changed_here(name, stamp, agreed, digests))
    ]
    # What cannot be read any more is not gone.
    hidden = tuple(f"{name}/" for name in scan.unreadable)
    gone = [name for name in agreement.keys() - stamps.keys() if not f"{name}/".startswith(hidden)]
    return Changes(tuple(sorted(changed)), tuple(sorted(gone, reverse=True)))


def ancestors(name: str) -> Iterator[str]:
    """The directories on the way to a name, the outermost first."""
    at = name.find("/")
    while at >= 0:
        yield name[:at]
        at = name.find("/", at + 1)


class Look:
    """What the sandbox has, as far as some changes have to know. Of a large tree little is kept."""

    def __init__(self, changes: Changes) -> None:
        self._ours = {*changes.changed, *changes.gone}
        self._wanted = {*self._ours, *(above for name in changes.changed for above in ancestors(name))}
        self.stamps: dict[str, Stamp] = {}
        self.occupied: set[str] = set()
        """Those of the changed directories that hold something which the sandbox made itself."""

    def saw(self, name: str, stamp: Stamp) -> None:
        if name in self._wanted:
            self.stamps[name] = stamp
        else:
            self.occupy(name)

    def occupy(self, name: str) -> None:
        """There is something which is none of ours."""
        self.occupied.update(above for above in ancestors(name) if above in self._ours)


def doubtful(scan: Scan, changes: Changes, agreement: Agreement, look: Look) -> list[str]:
    """Files that the sandbox has otherwise than agreed: only their content tells whose they are."""
    return [
        name
        for name in (*changes.changed, *changes.gone)
        if (found := look.stamps.get(name)) is not None
        and found.kind == FILE
        and not _is_ours(found, agreement.get(name), scan.stamps.get(name))
    ]


def first_push(scan: Scan) -> PushPlan:
    """Everything: the host's files take the place of whatever has their names."""
    return PushPlan(uploads=tuple(sorted(scan.stamps)))


def overriding(changes: Changes, agreement: Agreement) -> PushPlan:
    """Where the host always wins. A directory may hold what is the sandbox's own, and stays."""
    gone = tuple(name for name in changes.gone if agreement[name].here.kind != DIRECTORY)
    forgotten = tuple(name for name in changes.gone if name not in gone)
    return PushPlan(changes.changed, gone, forgotten=forgotten)


def push(scan: Scan, changes: Changes, agreement: Agreement, look: Look, alike: Container[str]) -> PushPlan:
    """What to do about the host's changes. `alike` has the doubtful names whose content is the host's own."""
    uploads: list[str] = []
    parted: list[str] = []
    adopted: list[str] = []
    blocked: set[str] = set()
    removals, forgotten, occupied = _removals(changes.gone, agreement, look, alike)
    replaced: set[str] = set()
    for name in changes.changed:
        if name not in agreement and _there_already(scan.stamps[name], look.stamps.get(name)):
            adopted.append(name)
        elif not replaced.isdisjoint(ancestors(name)):
            uploads.append(name)
        elif _gives_way(name, scan.stamps[name], agreement, look, alike, occupied):
            replaced.add(name)
            uploads.append(name)
        elif _blocked(name, scan.stamps[name], agreement, look, alike, blocked):
            blocked.add(name)
            parted.append(name)
        else:
            uploads.append(name)
    # Those go with the directory that they are in.
    inner = {name for name in removals if not replaced.isdisjoint(ancestors(name))}
    return PushPlan(
        uploads=tuple(uploads),
        removals=tuple(name for name in removals if name not in inner),
        replaced=tuple(sorted(replaced)),
        parted=tuple(parted),
        forgotten=(*forgotten, *inner),
        adopted=tuple(adopted),
    )


def _gives_way(
    name: str,
    stamp: Stamp,
    agreement: Agreement,
    look: Look,
    alike: Container[str],
    occupied: Container[str],
) -> bool:
    """Whether only the host has made a file of a directory, or a directory of something else."""
    agreed, found = agreement.get(name), look.stamps.get(name)
    if agreed is None or agreed.parted or found is None or DIRECTORY not in (stamp.kind, found.kind):
        return False
    ours = name in alike or same_there(agreed.there, found)
    return stamp.kind != found.kind and ours and name not in occupied


def _blocked(
    name: str,
    stamp: Stamp,
    agreement: Agreement,
    look: Look,
    alike: Container[str],
    blocked: Container[str],
) -> bool:
    """Whether sending it would destroy what the sandbox did."""
    for above in ancestors(name):
        if above in blocked or look.stamps.get(above, NEVER).kind not in ("", DIRECTORY):
            return True
    agreed, found = agreement.get(name), look.stamps.get(name)
    if agreed is not None and agreed.parted:
        return True
    if found is None:
        return False
    if DIRECTORY in (found.kind, stamp.kind):
        return found.kind != stamp.kind
    return not (name in alike or _is_ours(found, agreed, stamp))


def _is_ours(found: Stamp, agreed: Agreed | None, stamp: Stamp | None) -> bool:
    """Whether the sandbox's version is one that the host has, or had."""
    return _there_already(stamp, found) if agreed is None else same_there(agreed.there, found)


def _there_already(stamp: Stamp | None, found: Stamp | None) -> bool:
    """By size and time, as they are sent along: that is what every copying tool believes."""
    return stamp is not None and found is not None and same_there(sent(stamp), found)


def _removals(
    gone: Iterable[str], agreement: Agreement, look: Look, alike: Container[str]
) -> tuple[tuple[str, ...], tuple[str, ...], set[str]]:
    """Also the directories that are not ours alone. `gone` has what is in a directory before it."""
    removals, forgotten, occupied = [], [], set(look.occupied)
    for name in gone:
        agreed, found = agreement[name], look.stamps.get(name)
        ours = found is not None and (name in alike or _is_ours(found, agreed, None))
        if ours and not agreed.parted and name not in occupied:
            removals.append(name)
            continue
        forgotten.append(name)
        if found is not None:
            occupied.update(ancestors(name))
    return tuple(removals), tuple(forgotten), occupied


def with_ancestors(names: Iterable[str]) -> tuple[str, ...]:
    """An archive that names a directory keeps its mode; one that does not may not."""
    found = set(names)
    for name in tuple(found):
        found.update(ancestors(name))
    return tuple(sorted(found))


def after_push(
    scan: Scan,
    agreement: Agreement,
    plan: PushPlan,
    delivered: Mapping[str, tuple[Stamp, bytes]],
    look: Look | None,
) -> dict[str, Agreed]:
    """The new agreement, once the plan was carried out. `delivered` has what was really sent."""
    result = dict(agreement)
    for name in (*plan.removals, *plan.forgotten):
        result.pop(name, None)
    for name in plan.uploads:
        if name not in delivered:
            continue  # it vanished meanwhile, or cannot be read: the sandbox has what it had
        stamp, digest = delivered[name]
        result[name] = Agreed(
            # Changed while it was read: what was sent is not what is there now.
            stamp if stamp == scan.stamps.get(name) else NEVER,
            sent(stamp),
            frozenset({digest}),
            name in scan.young,
        )
    for name in plan.adopted:
        if look is not None:
            result[name] = Agreed(scan.stamps[name], look.stamps[name], young=name in scan.young)
    for name in plan.parted:
        before = agreement.get(name)
        there = before.there if before is not None else NEVER
        result[name] = Agreed(scan.stamps[name], there, parted=True)
    if look is not None:
        for name, found in look.stamps.items():
            if name in result and name not in plan.uploads and same_there(result[name].there, found):
                result[name] = replace(result[name], there=found)
    return result


def attempted(agreement: Agreement, digests: Mapping[str, bytes]) -> dict[str, Agreed]:
    """The agreement after a push that failed: what it sent may be there, and is ours."""
    result = dict(agreement)
    for name, digest in digests.items():
        before = agreement.get(name, Agreed(NEVER, NEVER))
        result[name] = replace(before, ours=before.ours | {digest})
    return result


def grown_up(agreement: Agreement, scan: Scan, names: Iterable[str]) -> dict[str, Agreed]:
    """The agreement after the content of these was found to be the same."""
    return {**agreement, **{name: replace(agreement[name], young=name in scan.young) for name in names}}
