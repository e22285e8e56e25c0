"""Sessions that move house, and copies of them."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hermitcrab
from hermitcrab.core import loop
from hermitcrab.environment import Environment, around
from hermitcrab.errors import ConfigError, HermitcrabWarning, SessionClosed, TransferError
from hermitcrab.files.entries import Limits
from hermitcrab.moving import Plan, move_into
from hermitcrab.testing.inside import raised, say, scratch, works
from hermitcrab.testing.suite import Opener, case

NAMES = ("a b", "line\nbreak", "ünï", "*")


def fill(directory: Path) -> None:
    """A small project with everything that is easily lost."""
    (directory / "sub" / "empty").mkdir(parents=True)
    for name in NAMES:
        (directory / "sub" / name).write_bytes(bytes(range(256)))
    (directory / "program").write_text("#!/bin/sh\necho it runs\n")
    (directory / "program").chmod(0o750)
    (directory / "sub" / "link").symlink_to("../program")
    (directory / "dangling").symlink_to("nowhere")


def listing(env: Environment) -> dict[str, tuple[str, int, str]]:
    """What is in the workspace, but for times and owners."""
    return {
        each.path: (each.kind, 0 if each.kind == "link" else each.mode, each.target)
        for each in env.files.walk(env.workspace)
    }


@case
def a_session_moves_in_with_its_files_and_out_again(open: Opener) -> None:
    """Files, modes, links, directory, variables and functions go along; what is the place's own does not."""
    there = open()
    path = say(there, "echo $PATH")
    with tempfile.TemporaryDirectory() as project, tempfile.TemporaryDirectory() as elsewhere:
        fill(Path(project))
        with hermitcrab.open("local", cwd=project) as here:
            say(
                here,
                'hello() { echo "hello $who"; }; who=crab; export who; cd sub/empty; cd ..; PATH=$PATH:/odd',
            )
            wanted = listing(here)
            new = moved(here, there)
            raised(SessionClosed, lambda: here.execute("true"))
        with new:
            assert listing(new) == wanted
            assert [new.files.read(name) for name in NAMES] == [bytes(range(256))] * len(NAMES)
            assert new.cwd == f"{new.workspace}/sub"
            assert say(new, "hello; ./link; cd - >/dev/null; pwd") == (
                f"hello crab\nit runs\n{new.workspace}/sub/empty"
            )
            assert say(new, "echo $PATH") == (path if there.backend != "local" else f"{path}:/odd")
            say(new, "who=everybody; export LD_ODD=1 MAKEFILES=odd; alias odd=echo; rm ../../dangling; cd ..")
            back = new.move_to("local", cwd=elsewhere)
        with back:
            assert (back.cwd, back.workspace) == (f"{elsewhere}/sub", elsewhere)
            assert Path(elsewhere, "sub", NAMES[1]).read_bytes() == bytes(range(256))
            assert not Path(elsewhere, "dangling").is_symlink()
            assert say(back, "echo $who") == "everybody"
            trusted = not there.traits.isolated
            assert back.execute("hello").returncode == (0 if trusted else 127)
            assert say(back, "echo ${LD_ODD-} ${MAKEFILES-}") == ("1 odd" if trusted else "")
            assert ("odd" in back.state.aliases) == trusted


def moved(here: Environment, there: Environment) -> Environment:
    """Into a sandbox like that one; where it has no workspace of its own, to an empty directory."""
    settings = there._async._resolved
    if not there.traits.workspace:
        settings = replace(settings, session=replace(settings.session, cwd=scratch(there)))
    with quietly():
        return around(loop.run(move_into(here._async, settings, Plan())))


@contextmanager
def quietly() -> Iterator[None]:
    """Without what a sandbox that is started like another one has to say once more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HermitcrabWarning)
        yield


@case
def a_move_that_fails_changes_nothing(open: Opener) -> None:
    """The old sandbox goes on as if nothing had been tried, and the new place is as it was."""
    env = open()
    directory = env.workspace or scratch(env)
    say(env, f"cd {directory}; echo mine >it; kept=1")
    with tempfile.TemporaryDirectory() as taken:
        Path(taken, "theirs").touch()
        error = raised(ConfigError, lambda: env.move_to("local", cwd=taken, directory=directory))
        assert "not empty" in str(error)
        missing = f"{taken}/place"
        raised(
            TransferError,
            lambda: env.move_to("local", cwd=missing, directory=directory, limits=Limits(bytes=1)),
        )
        assert [str(each.relative_to(taken)) for each in Path(taken).rglob("*")] == ["theirs"]
    raised(ConfigError, lambda: env.move_to("local", directory="/no/such/directory"))
    assert say(env, "cat it; echo $kept; pwd -P") == f"mine\n1\n{env.cwd}"
    works(env)


@case
def forks_are_independent(open: Opener) -> None:
    """Each copy has the files and the state as they were, and what happens in one is seen in no other."""
    env = open()
    directory = env.workspace or scratch(env)
    say(
        env,
        f"mkdir -p {directory}/sub; cd {directory}/sub; echo old >it; f() {{ echo $v; }}; v=1; chmod 640 it",
    )
    with quietly():
        forks = env.fork(2)
    try:
        for number, each in enumerate(forks):
            assert say(each, "f; cat it") == "1\nold"
            assert each.files.stat("it").mode == 0o640
            say(each, f"v=fork{number}; echo $v >it; touch own{number}")
        assert [say(each, "f; cat it; ls") for each in forks] == [
            f"fork{number}\nfork{number}\nit\nown{number}" for number in range(2)
        ]
        assert say(env, "f; cat it; ls") == "1\nold\nit"
        copies = [each.workspace for each in forks]
    finally:
        for each in forks:
            each.cleanup()
    if not env.traits.workspace:
        assert not any(env.files.exists(each) for each in copies if each)
    works(env)
