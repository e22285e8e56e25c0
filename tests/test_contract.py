"""The contract suite on every backend of this machine."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import hermitcrab
from hermitcrab.agent.program import CHOICE
from hermitcrab.backends import registry
from hermitcrab.testing import CASES, Case
from hermitcrab.testing.for_pytest import check, parameters
from tests import engines
from tests.clouds import running
from tests.conftest import required
from tests.gateway.served import served
from tests.test_plain import CANNOT as WITHOUT_AN_AGENT

if TYPE_CHECKING:
    from _pytest.mark import MarkDecorator, ParameterSet


@dataclass(frozen=True)
class Kind:
    """A backend, and how it is run."""

    name: str
    backend: str
    variables: Mapping[str, str] = field(default_factory=dict)
    cloud: str = ""
    """The provider on this machine that it runs at: a module of `tests.clouds`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    cannot: Mapping[str, str] = field(default_factory=dict)
    """Case -> why this kind honestly cannot meet it."""
    may_not: Mapping[str, str] = field(default_factory=dict)
    """The beginning of a case's name -> why it depends on chance whether this kind meets it."""
    requirement: str = ""
    """Its name in HERMITCRAB_REQUIRE, where that is not the backend's."""
    served: str = ""
    """The engine of a gateway on this machine that it is behind."""
    asked: frozenset[str] | None = None
    """The modules of cases that it is asked at all; None: every one."""
    sampled: frozenset[str] | None = None
    """Slow, or mostly a variation of another kind: `make test` asks it the cases of these modules alone."""


SAMPLE = frozenset(
    {"kills", "given", "files", "trees", "terminals", "background", "loss", "limits", "moving", "snapshots"}
)
"""The modules of cases that a sampled kind is asked in `make test`: where the kind of sandbox matters more
than bash. `make test-all` asks all."""
LARGE_SAMPLE = frozenset(case.module for case in CASES.values()) - {
    "endings",
    "redefined",
    "state",
    "locals",
    "disguise",
    "options",
}
"""All but what concerns bash itself, which is the same bash everywhere."""
SMALL_SAMPLE = frozenset({"kills", "given", "files", "trees", "snapshots"})
CLOUD_SAMPLE = frozenset({"kills", "given", "loss", "snapshots"})
"""Of one that shares all but its wire with E2B, which is asked more."""

_OLD_STATX = "this gVisor refuses the flags that newer coreutils give to statx, so `ls` and `stat` fail in it"
_NO_SUBREAPER = "this gVisor has no child subreapers; what detached itself twice is not found"
_HALF_A_TERMINAL = (
    "this gVisor's terminals are incomplete: no /dev/tty, no signals to the foreground, no resizing"
)

GVISOR_CANNOT = {
    **dict.fromkeys(
        [
            "a_program_inherits_nothing_but_the_environment",
            "a_mode_is_kept_or_set",
            "a_link_is_followed",
            "files_travel_between_host_and_sandbox",
            "the_umask_is_remembered",
        ],
        _OLD_STATX,
    ),
    **dict.fromkeys(
        [
            "a_command_can_have_a_terminal",
            "a_terminal_can_be_resized",
            "ctrl_c_on_a_terminal_interrupts_the_program",
            "the_end_of_input_can_be_typed",
            "a_full_screen_program_runs_on_a_terminal",
            "an_interactive_shell_runs_on_a_terminal",
        ],
        _HALF_A_TERMINAL,
    ),
    "a_very_deep_directory_is_remembered": "this gVisor's getcwd fails beyond 4096 bytes, and bash with it",
}

_NO_LIVE_STDIN = "a gateway gives a command its whole input when it starts"
GATEWAY_CANNOT = {
    **{case: why for case, why in WITHOUT_AN_AGENT.items() if "terminal" in why},
    **dict.fromkeys(
        [
            "a_forwarded_variable_is_the_hosts_of_that_moment",
            "other_commands_processes_are_spared",
            "input_can_be_written_while_the_command_runs",
            "a_started_process_is_steered",
            "waiting_for_a_process_may_be_given_up",
            "what_runs_is_listed",
            "a_started_process_outlives_commands_and_their_limits",
            "megabytes_written_to_a_process_arrive",
        ],
        _NO_LIVE_STDIN,
    ),
    "what_is_carried_can_be_read_and_not_changed": "a gateway passes no credentials of the host through",
    "a_slow_reader_makes_the_command_wait": "a gateway keeps output for whoever reads slowly",
}
SILENT = frozenset(
    {
        *("background", "directories", "disguise", "endings", "files"),
        *("locals", "options", "redefined", "state", "trees"),
    }
)
"""The modules of cases of which none reads a command's output while it runs."""
_LAGGED = "of a long output a gateway keeps the last, and who reads it live may fall behind"

KINDS = (
    Kind("local", "local"),
    Kind("local-python", "local", {CHOICE: "python"}, sampled=LARGE_SAMPLE),
    Kind("bubblewrap", "bubblewrap"),
    Kind("docker", "docker", options={"image": engines.IMAGE}, sampled=LARGE_SAMPLE),
    Kind(
        "gvisor",
        "docker",
        options={"image": engines.IMAGE, "runtime": "runsc"},
        requirement="gvisor",
        cannot=GVISOR_CANNOT,
        may_not=dict.fromkeys(("nothing_survives", "a_fork_chain", "many_children"), _NO_SUBREAPER),
        sampled=SMALL_SAMPLE,
    ),
    Kind(
        "docker-plain",
        "docker",
        {CHOICE: "none"},
        options={"image": engines.IMAGE},
        cannot=WITHOUT_AN_AGENT,
        may_not={"a_killed_warm_shell": "the shell that keeps the container is one that a command can kill"},
        sampled=frozenset({"kills", "given"}),
    ),
    Kind("podman", "podman", options={"image": engines.IMAGE}, sampled=SAMPLE),
    Kind("ssh", "ssh", options=engines.SSH, sampled=SAMPLE),
    Kind("apptainer", "apptainer", options=engines.APPTAINER, sampled=SAMPLE),
    Kind("e2b", "e2b", cloud="e2b", sampled=SMALL_SAMPLE | {"loss"}),
    Kind("daytona", "daytona", cloud="daytona", sampled=CLOUD_SAMPLE),
    Kind("vercel", "vercel", cloud="vercel", sampled=CLOUD_SAMPLE),
    Kind("modal", "modal", cloud="modal", sampled=CLOUD_SAMPLE),
    Kind(
        "gateway",
        "gateway",
        served="bubblewrap",
        cannot=GATEWAY_CANNOT,
        may_not={"memory_does_not_grow": _LAGGED},
        sampled=frozenset({"kills", "trees"}),
    ),
    Kind(
        "gateway-five-calls",
        "gateway",
        cloud="five_calls",
        asked=SILENT,
        sampled=frozenset({"background"}),
    ),
)


def is_asked(kind: Kind, each: ParameterSet) -> bool:
    case = each.values[0]
    assert isinstance(case, Case)
    return kind.asked is None or case.module in kind.asked


def marks(kind: Kind, each: ParameterSet) -> list[MarkDecorator]:
    case = each.values[0]
    assert isinstance(case, Case)
    everyday = kind.sampled is None or case.module in kind.sampled
    why = [reason for beginning, reason in kind.may_not.items() if case.name.startswith(beginning)]
    return [
        *([] if everyday else [pytest.mark.thorough]),
        *(pytest.mark.xfail(reason=reason, strict=False) for reason in why),
    ]


@functools.cache
def missing(backend: str) -> str:
    """Why a backend cannot run here; empty when it can."""
    health = registry.get(backend).check()
    return "" if health.usable else f"{backend}: {health.detail} {health.hint}"


def needs_backend(backend: str, requirement: str = "") -> None:
    if reason := missing(backend):
        if (requirement or backend) in required():
            pytest.fail(f"required, but missing: {reason}")
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, *each.values, id=f"{kind.name}-{each.id}", marks=[*each.marks, *marks(kind, each)])
        for kind in KINDS
        for each in parameters(kind.cannot)
        if is_asked(kind, each)
    ],
)
def test_promise(kind: Kind, case: Case, quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = running.cloud(kind.cloud).variables if kind.cloud else {}
    found = served(kind.served) if kind.served else found
    for name, value in {**kind.variables, **found}.items():
        monkeypatch.setenv(name, value)
    needs_backend(kind.backend, kind.requirement)

    def opener(**options: Any) -> hermitcrab.Environment:
        with warnings.catch_warnings():
            # It says that it has to do without the agent, or without a limit.
            warnings.simplefilter("ignore", hermitcrab.HermitcrabWarning)
            return hermitcrab.open(kind.backend, **{**kind.options, **options})

    check(case, opener)


def test_every_case_states_its_promise() -> None:
    assert len(CASES) > 200
    for case in CASES.values():
        assert case.promise.endswith("."), case.name
        assert "\n" not in case.promise


def test_an_unknown_case_in_the_mapping_is_an_error() -> None:
    with pytest.raises(ValueError, match="no case is named nonsense"):
        parameters({"nonsense": "because"})
