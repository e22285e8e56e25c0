"""What a sync back has to do on the host, from what the sandbox has and what both last agreed on. Pure.

As in `planning.py`: where both sides have changed a name, nothing is overwritten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from hermitcrab.files.entries import weight
from hermitcrab.files.manifest import DIRECTORY, NEVER, OTHER, Scan, Stamp
from hermitcrab.files.planning import Agreed, Agreement, ancestors, changed_here, content_digest, same_there


class Returned(NamedTuple):
    """What the sandbox did since the agreement."""

    changed: Mapping[str, Stamp]
    missing: tuple[str, ...]
    """What is in a directory before it."""
    seen: Mapping[str, Stamp]
    """What is as agreed, by the stamps that it has."""


class Survey:
    """Finds out what the sandbox changed, from the names of its whole tree; keeps the changed ones only."""

    def __init__(self, agreement: Agreement, foreign: Mapping[str, Stamp]) -> None:
        self._agreement = agreement
        self._foreign = foreign
        self._seen: dict[str, Stamp] = {}
        self.changed: dict[str, Stamp] = {}
        self.weight = 0
        """Of the changed ones together."""

    def saw(self, name: str, stamp: Stamp) -> None:
        agreed = self._agreement.get(name)
        if agreed is not None and not agreed.parted and same_there(agreed.there, stamp):
            self._seen[name] = stamp
        elif agreed is not None or not same_there(self._foreign.get(name, NEVER), stamp):
            self.changed[name] = stamp
            self.weight += weight(name, stamp.target)

    def result(self) -> Returned:
        missing = self._agreement.keys() - self._seen.keys() - self.changed.keys()
        closed = {name for name, stamp in self.changed.items() if stamp.kind == OTHER}
        if closed:
            # What is in a directory that is closed to us is not gone.
            missing = {name for name in missing if closed.isdisjoint(ancestors(name))}
        return Returned(self.changed, tuple(sorted(missing, reverse=True)), self._seen)


class Action(Enum):
    """What happens on the host to one name."""

    PLACE = "the sandbox's version takes its place"
    BESIDE = "both have changed it: the sandbox's version lands beside it"
    MAKE = "a directory is made"
    TRASH = "removed in the sandbox: it is put aside"
    KEEP = "removed in the sandbox, but changed here: it stays"
    FORGET = "it is gone on both sides"
    AGREE = "both have the same"


class Step(NamedTuple):
    action: Action
    name: str


@dataclass(frozen=True)
class Arrived:
    """What came out of the sandbox."""

    digests: Mapping[str, bytes]
    """Of the files and links that were fetched."""
    left: frozenset[str] = field(default_factory=frozenset)
    """Too much, or of no kind that can come back; they stay in the sandbox."""


def settle(
    scan: Scan, agreement: Agreement, returned: Returned, arrived: Arrived, digests: Mapping[str, bytes]
) -> list[Step]:
    """What to do on the host about the sandbox's changes.

    `digests` has those of the host's files, where the sandbox has another version or the stamp cannot tell.
    """
    steps = []
    for name in sorted(returned.changed):
        found, here = returned.changed[name], scan.stamps.get(name)
        if found.kind == DIRECTORY:
            steps.append(Step(Action.MAKE if here is None else Action.AGREE, name))
        elif name in arrived.digests:
            steps.append(Step(_fate(name, here, agreement.get(name), arrived.digests[name], digests), name))
    for name in returned.missing:
        here, agreed = scan.stamps.get(name), agreement[name]
        if here is None or agreed.there == NEVER:
            steps.append(Step(Action.FORGET, name))  # or it never arrived there
        elif agreed.parted or changed_here(name, here, agreed, digests):
            steps.append(Step(Action.KEEP, name))
        else:
            steps.append(Step(Action.TRASH, name))
    return steps


def _fate(
    name: str, here: Stamp | None, agreed: Agreed | None, arrived: bytes, digests: Mapping[str, bytes]
) -> Action:
    if here is None:
        # Removed on the host, edited in the sandbox: an edit is worth more than a removal.
        return Action.PLACE
    if digests.get(name) == arrived:
        return Action.AGREE
    if agreed is None or agreed.parted or here.kind == DIRECTORY:
        return Action.BESIDE
    if changed_here(name, here, agreed, digests):
        # Only touched in the sandbox: the host's edit is the only one there is.
        return Action.AGREE if arrived in agreed.ours else Action.BESIDE
    return Action.PLACE


def after_return(
    scan: Scan,
    agreement: Agreement,
    returned: Returned,
    arrived: Arrived,
    done: Mapping[str, tuple[Action, Stamp | None]],
    digests: Mapping[str, bytes],
) -> dict[str, Agreed]:
    """The new agreement. `done` has what really happened, and what the host has there now."""
    result = dict(agreement)
    for name, stamp in returned.seen.items():
        result[name] = replace(result[name], there=stamp)
    for name, (action, now) in done.items():
        found, before = returned.changed.get(name), agreement.get(name)
        if found is None or now is None:
            if action in (Action.TRASH, Action.FORGET, Action.KEEP):
                result.pop(name, None)  # what the host still has is new to the sandbox
            continue
        digest = arrived.digests.get(name) or content_digest(found)
        match action:
            case Action.PLACE | Action.MAKE:
                result[name] = Agreed(now, found, frozenset({digest}), young=True)
            case Action.BESIDE:
                # The sandbox's version is safe: from now on the host's is the newer one.
                result[name] = Agreed(NEVER, found, frozenset({digest}))
            case Action.AGREE if found.kind == DIRECTORY == now.kind or digests.get(name) == digest:
                result[name] = Agreed(now, found, frozenset({digest}), young=name in scan.young)
            case Action.AGREE if before is not None:
                result[name] = replace(before, there=found, parted=False)
    return result
