"""Deliberately broken environments. Each must fail the cases that it names, or the suite is asleep.

A mutant is one small substitution in the way of a command, in force while its context is open:

    with MUTANTS["no_dump_on_exit"].alive():
        CASES[name].run(opener)     # raises
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from hermitcrab.agent.wire import Cause, Exit, Frame, Start, Tell
from hermitcrab.core import command, dump, farewell, script, session, shells
from hermitcrab.core.agent import AgentSandbox
from hermitcrab.core.capture import Capture
from hermitcrab.core.command import Command, checked_stdin
from hermitcrab.core.dump import DamagedDump, Parsed
from hermitcrab.core.execs import AgentExec, Input
from hermitcrab.core.state import NEVER_CARRIED_OPTIONS, ShellState
from hermitcrab.environment import Environment
from hermitcrab.result import Result

Substitution = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutant:
    """A way to be broken."""

    name: str
    wrong: str
    """What it does wrong."""
    caught_by: tuple[str, ...]
    """The cases that must fail."""
    alive: Substitution


MUTANTS: dict[str, Mutant] = {}


def _mutant(*caught_by: str) -> Callable[[Substitution], Substitution]:
    def decorate(substitution: Substitution) -> Substitution:
        name = substitution.__name__
        MUTANTS[name] = Mutant(name, substitution.__doc__ or "", caught_by, substitution)
        return substitution

    return decorate


@_mutant("the_state_is_captured_at_the_end_by[exit]", "the_state_is_captured_at_the_end_by[set_e]")
def no_dump_on_exit() -> AbstractContextManager[Any]:
    """The state is told only by a command that reaches its end."""
    return patch.object(script, "EXIT_TRAP", ":")


@_mutant("nothing_survives_an_interrupt[setsid]", "nothing_survives_a_timeout")
def kills_the_process_group_only() -> AbstractContextManager[Any]:
    """A process that called setsid outlives its command."""
    return _weak_kill("-- -")


@_mutant("nothing_survives_an_interrupt[child]", "nothing_survives_a_timeout")
def kills_the_shell_only() -> AbstractContextManager[Any]:
    """A time-out ends the shell and leaves what the shell started."""
    return _weak_kill("")


@_mutant("a_command_runs_exactly_once")
def runs_a_command_twice() -> AbstractContextManager[Any]:
    """Every command is run, and run again."""

    def order(changes: bytes, preparation: bytes, state: ShellState, text: str) -> bytes:
        return _order(changes, preparation, state, f"{text}\n{text}")

    return patch.object(script, "order", order)


@_mutant("a_command_runs_exactly_once")
def tries_again_when_the_shell_was_killed() -> AbstractContextManager[Any]:
    """A command whose shell died is taken for one that did not run."""

    def execute(self: Environment, *arguments: Any, **options: Any) -> Result:
        result = _execute(self, *arguments, **options)
        return _execute(self, *arguments, **options) if result.returncode == 137 else result

    return patch.object(Environment, "execute", execute)


@_mutant("tracing_shows_the_command_and_no_more[x]", "exec_replaces_the_shell_and_nothing_else[a_program]")
def in_band_marker() -> AbstractContextManager[Any]:
    """The status travels in the output, behind a marker."""
    mark = "\n__status="

    def order(changes: bytes, preparation: bytes, state: ShellState, text: str) -> bytes:
        return _order(changes, preparation, state, f"{text}\nprintf '\\n__status=%d' $?")

    def execute(self: Environment, *arguments: Any, **options: Any) -> Result:
        result = _execute(self, *arguments, **options)
        output, _, status = result.output.rpartition(mark)
        return replace(result, output=output, returncode=int(status) if status.isdigit() else 1)

    return _all(patch.object(script, "order", order), patch.object(Environment, "execute", execute))


@_mutant("a_dangerous_option_is_never_carried[e]", "all_dangerous_options_at_once_are_never_carried")
def carries_errexit() -> AbstractContextManager[Any]:
    """`set -e` holds in the next command."""
    return patch.object(dump, "NEVER_CARRIED_OPTIONS", NEVER_CARRIED_OPTIONS - {"errexit"})


@_mutant("half_a_state_changes_nothing")
def believes_half_a_state() -> AbstractContextManager[Any]:
    """A dump that was cut short is completed with nothing and believed."""

    def parse(data: bytes, previous: Parsed | None, **options: Any) -> Parsed:
        try:
            return _parse(data, previous, **options)
        except DamagedDump:
            sections = data.removesuffix(b"\0").split(b"\0")
            missing = 10 - (len(sections) - sections.index(farewell.DUMP_BEGIN)) if b"state1" in data else 0
            whole = b"\0".join([*sections, *[b""] * (missing - 1), farewell.DUMP_END, b""])
            return _parse(whole, previous, **options)

    return patch.object(dump, "parse", parse)


@_mutant("a_given_value_is_in_no_process_list")
def secret_in_argv() -> AbstractContextManager[Any]:
    """The environment is handed to the shell in its arguments."""

    def start(**fields: Any) -> Start:
        leaked = b" ".join([fields["argv"][0], *fields.get("env", ())])
        return Start(**{**fields, "argv": [leaked, *fields["argv"][1:]]})

    return patch.object(shells, "Start", start)


@_mutant("two_commands_merge_what_they_changed", "a_slow_command_that_changed_nothing_undoes_nothing")
def last_one_takes_all() -> AbstractContextManager[Any]:
    """Whoever ends last overwrites what others did meanwhile."""
    return patch.object(session, "merge", lambda base, ours, theirs: theirs)


@_mutant("long_output_is_kept_in_a_file", "memory_does_not_grow_with_output")
def caps_output_without_spill() -> AbstractContextManager[Any]:
    """What is beyond the limit is thrown away."""

    def add(self: Capture, data: bytes) -> None:
        _add(self, data[: max(0, self._limit - self.size)])

    return patch.object(Capture, "add", add)


@_mutant("a_local_does_not_become_a_variable[plain]", "a_local_does_not_replace_a_variable[plain]")
def leaks_locals() -> AbstractContextManager[Any]:
    """The locals of a function that exits become the session's."""
    return patch.object(script, "EXIT_TRAP", farewell.EXIT_TRAP.replace(farewell.UNCOVER, ":"))


@_mutant("a_background_process_lives_on[plain]", "many_background_processes_live_on")
def background_dies_with_its_command() -> AbstractContextManager[Any]:
    """The end of the shell is the end of what it left in the background."""
    held: dict[tuple[AgentSandbox, int], Frame] = {}

    def dispatch(self: AgentSandbox, frame: Frame) -> None:
        process = self._execs.get(frame.exec_id)
        if frame.type == Tell.EXIT and process is not None:
            process.kill(0)
            held[self, frame.exec_id] = frame
            return
        if frame.type == Tell.GONE and (exit_ := held.pop((self, frame.exec_id), None)):
            _dispatch(self, exit_)
        _dispatch(self, frame)

    return patch.object(AgentSandbox, "_dispatch", dispatch)


@_mutant("a_dead_sandbox_is_an_exception", "a_dead_sandbox_ends_every_waiting_command")
def takes_a_dead_sandbox_for_output() -> AbstractContextManager[Any]:
    """A lost sandbox is a result with an error text and the status 1."""

    def lost(self: Command, reason: str) -> None:
        self._finish(Result(f"error: {reason}\n", 1), None)

    return patch.object(Command, "lost", lost)


@_mutant("a_symbolic_link_is_resolved")
def records_the_logical_directory() -> AbstractContextManager[Any]:
    """`pwd` instead of `pwd -P` is what is remembered."""
    return patch.object(script, "LAST_WORDS", farewell.LAST_WORDS.replace(b"pwd -P", b"pwd"))


@_mutant("input_as_text_is_encoded_and_nothing_else", "output_is_not_changed")
def completes_the_last_line_of_input() -> AbstractContextManager[Any]:
    """stdin that does not end in a line break gets one."""

    def checked(data: bytes | str | None) -> bytes:
        given = checked_stdin(data)
        return given + b"\n" if given and not given.endswith(b"\n") else given

    return patch.object(session, "checked_stdin", checked)


@_mutant("a_slow_reader_makes_the_command_wait")
def reads_ahead_without_end() -> AbstractContextManager[Any]:
    """Output that nobody has read yet is taken in all the same."""
    return patch.object(command, "_READ_AHEAD", 1 << 62)


@_mutant("an_alias_works_in_later_commands")
def forgets_aliases() -> AbstractContextManager[Any]:
    """Aliases are captured and not restored."""
    return patch.object(script, "_aliases", lambda state: b":")


_order = script.order
_execute = Environment.execute
_parse = dump.parse
_add = Capture.add
_dispatch = AgentSandbox._dispatch
_give = AgentExec.give
_kill = AgentExec.kill
_ended = Command.ended


@contextmanager
def _all(*substitutions: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for substitution in substitutions:
            stack.enter_context(substitution)
        yield


def _weak_kill(target: str) -> AbstractContextManager[Any]:
    """Ending a command becomes `kill -KILL` of its shell's id with `target` before it."""
    causes: dict[object, Cause] = {}
    notes: dict[AgentExec, str] = {}
    under_way = threading.local()

    def order(changes: bytes, preparation: bytes, state: ShellState, text: str) -> bytes:
        # The shell notes its id in a file of the sandbox's; the same thread gives the order to its exec next.
        under_way.note = f"/tmp/crab-mutant-{uuid.uuid4().hex}"
        noting = f'\\builtin printf %s "$$" >{under_way.note}; '.encode()
        return _order(changes, preparation + noting, state, text)

    def give(self: AgentExec, *inputs: Input, **options: Any) -> None:
        limit = options.pop("limit", None)
        if isinstance(self.sink, Command) and hasattr(under_way, "note"):
            notes.setdefault(self, under_way.note)
        _give(self, *inputs, **options)
        if limit is not None:
            loop = self._sandbox.loop
            loop.call_soon_threadsafe(lambda: loop.call_later(limit[0], strike, self, Cause.TIMER))

    def strike(self: AgentExec, cause: Cause) -> None:
        if self not in notes or self.ended:
            return
        causes[self] = cause
        sandbox, note = self._sandbox, notes[self]
        spawning = sandbox.spawn(["bash", "-c", f"kill -KILL {target}$(<{note}); rm {note}"])
        sandbox.loop.call_soon_threadsafe(lambda: sandbox.loop.create_task(spawning))

    def kill(self: AgentExec, grace: float) -> None:
        if self in notes:
            strike(self, Cause.KILLED)
        else:
            _kill(self, grace)

    def ended(self: Command, exit_: Exit) -> None:
        _ended(self, replace(exit_, cause=causes.get(self.exec, exit_.cause)))

    return _all(
        patch.object(script, "order", order),
        patch.object(AgentExec, "kill", kill),
        patch.object(AgentExec, "give", give),
        patch.object(Command, "ended", ended),
    )
