"""Named sessions, used as people do: each command in a process of its own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from hermitcrab import cli, sessions
from hermitcrab.backends import registry
from hermitcrab.cli.cp import Side, basename, side
from hermitcrab.cli.meter import line, size
from hermitcrab.errors import ConfigError
from hermitcrab.files.entries import Progress
from hermitcrab.records import TASK
from hermitcrab.store import Store
from tests import engines
from tests.test_contract import needs_backend

SOURCE = Path(__file__).parent.parent / "src"
CRAB = [sys.executable, "-m", "hermitcrab.cli"]
PATIENCE = 60.0


@pytest.fixture(autouse=True)
def home(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What a test leaves of its sessions ends with it: on `local`, too, each has an agent that lives on."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    yield quiet_home
    for each in sessions.every():
        sessions.remove(each.name, force=True)


def crab(
    *arguments: str, stdin: str | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        [*CRAB, *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        **options,
    )


def said(*arguments: str, **options: Any) -> str:
    """What a command that must succeed, and say nothing else, prints."""
    done = crab(*arguments, **options)
    assert (done.returncode, done.stderr) == (0, ""), done
    return done.stdout


def refused(*arguments: str, code: int = 2) -> str:
    """What is said of a command that must fail; in this program, which is quicker."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        assert cli.main([*arguments]) == code
    assert out.getvalue() == ""
    return err.getvalue()


# --- one session ---------------------------------------------------------------------------------------


def test_a_session_goes_on_from_one_command_to_the_next(tmp_path: Path) -> None:
    assert said("new", "work", "--on", "local", "--cwd", str(tmp_path), "--env", "A=1") == (
        "work is on local; run commands with: hermitcrab exec work COMMAND\n"
    )
    said("exec", "work", 'mkdir sub; cd sub; hi() { echo "hi $A $1"; }; list=(a "b c"); shopt -s nullglob')
    assert (
        said("exec", "work", "pwd; hi there; echo ${#list[@]} *.none") == f"{tmp_path}/sub\nhi 1 there\n2\n"
    )
    assert said("exec", "work", "printf", "[%s]", "a  b", "$HOME") == "[a  b][$HOME]"
    assert said("exec", "work", "cat; unset A", stdin="from a pipe") == "from a pipe"
    assert said("exec", "work", "hi") == "hi  \n"
    assert crab("exec", "work", "exit 7").returncode == 7
    timed_out = crab("exec", "--timeout", "0.2", "work", "sleep 60")
    assert (timed_out.returncode, timed_out.stderr) == (124, "[Command timed out after 0.2s]\n")
    result = json.loads(said("exec", "--json", "--cwd", "..", "work", "echo out"))
    assert (result["output"], result["backend"]) == ("out\n", "local")
    (listed,) = json.loads(crab("ps", "--json").stdout)["sessions"]
    assert (listed["name"], listed["place"], listed["cwd"]) == ("work", "local", str(tmp_path))
    assert crab("rm", "work").stdout == f"removed work; its files stay in {tmp_path}\n"
    assert (tmp_path / "sub").is_dir()
    assert "hermitcrab new work" in refused("exec", "work", "true")


def test_names(home: Path) -> None:
    said("new", "alpha", "--on", "local")
    assert "did you mean 'alpha'" in refused("exec", "alhpa", "true")
    assert "there is a session named 'alpha'" in refused("new", "alpha", "--on", "local")
    assert "no name for a session" in refused("new", "../x", "--on", "local")
    for name in ("a b", "-x", "", "a" * 41, "ls", "ünï", "a\n"):
        with pytest.raises(ConfigError, match="no name for a session"):
            sessions.checked(name)
    assert "give a command" in refused("exec", "alpha")
    assert sessions.find("alpha").on == "local"


def test_settings_of_a_session_are_those_that_it_was_made_with(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "hermitcrab.toml").write_text(
        '[environments.quick]\nbackend = "bubblewrap"\ntimeout = 0.2\nhostname = "from-the-file"\n'
    )
    made = subprocess.run(
        [*CRAB, "new", "q", "--on", "quick", "--set", "tmp_size=8"],
        cwd=project,
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made
    assert said("exec", "q", "hostname; df -m --output=size /tmp").split() == [
        "from-the-file",
        "1M-blocks",
        "8",
    ]
    assert crab("exec", "q", "sleep 60").returncode == 124
    assert "unknown key 'tmp_sice', did you mean" in refused(
        "new", "r", "--on", "bubblewrap", "--set", "tmp_sice=8"
    )
    assert "KEY=VALUE" in refused("new", "r", "--on", "local", "--set", "tmp_size")
    said("rm", "q")


def test_a_sandbox_that_does_not_start_leaves_no_session() -> None:
    assert "hostname" in refused("new", "x", "--on", "bubblewrap", "--set", "hostname=-no-")
    assert sessions.every() == []


def test_forwarded_values_are_not_stored_and_given_ones_are(home: Path) -> None:
    forwarded = {"TOKEN_X": "a-secret-of-ours"}
    said(
        "new",
        "s",
        "--on",
        "local",
        "--set",
        'forward_env=["TOKEN_X"]',
        "--env",
        "GIVEN=stored",
        env=forwarded,
    )
    assert said("exec", "s", "echo $TOKEN_X $GIVEN", env=forwarded) == "a-secret-of-ours stored\n"
    assert said("exec", "s", "echo ${TOKEN_X-none}") == "none\n"
    stored = b"".join(path.read_bytes() for path in (home / ".local/state/hermitcrab").glob("store.db*"))
    assert b"a-secret-of-ours" not in stored
    assert b"stored" in stored


# --- several programs ----------------------------------------------------------------------------------


@pytest.fixture
def local() -> Iterator[None]:
    said("new", "w", "--on", "local")
    yield
    crab("rm", "w")


@pytest.mark.usefixtures("local")
def test_two_at_once_take_turns_and_nothing_is_lost(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with subprocess.Popen(
        [*CRAB, "exec", "w", f"first=1; echo begun; read -r line <{fifo}"], stdout=-1
    ) as first:
        assert first.stdout
        assert first.stdout.readline() == b"begun\n"
        with subprocess.Popen([*CRAB, "exec", "w", "second=$first$first"], stderr=-1) as second:
            assert second.stderr
            # It waits, and says so, before the first one may go on.
            assert second.stderr.readline() == b"hermitcrab: w is in use by another program; waiting for it\n"
            fifo.write_text("go on\n")
    assert (first.returncode, second.returncode) == (0, 0)
    assert said("exec", "w", "echo $first $second") == "1 11\n"


@pytest.mark.usefixtures("local")
def test_a_killed_program_leaves_the_session_as_it_was() -> None:
    said("exec", "w", "v=before")
    with subprocess.Popen([*CRAB, "exec", "w", "v=after; echo begun; sleep 1000"], stdout=-1) as process:
        assert process.stdout
        assert process.stdout.readline() == b"begun\n"
        process.kill()
    done = crab("exec", "w", "echo $v")
    assert done.stdout == "before\n"
    assert "killed still runs there" in done.stderr


@pytest.mark.usefixtures("local")
def test_ctrl_c_ends_the_command_and_keeps_the_session() -> None:
    said("exec", "w", "v=kept")
    with subprocess.Popen([*CRAB, "exec", "w", "echo begun; sleep 1000"], stdout=-1, stderr=-1) as process:
        assert process.stdout
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert said("exec", "w", "echo $v") == "kept\n"


@pytest.mark.usefixtures("local")
def test_what_runs_on_is_there_and_what_ends_with_its_command_is_told() -> None:
    pid = int(said("exec", "w", "sleep 1000 & echo $!"))
    assert said("exec", "w", f"kill -0 {pid} && echo alive") == "alive\n"
    said("rm", "w")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    python = {"HERMITCRAB_AGENT": "python"}  # which does not outlive its program
    said("new", "w", "--on", "local", env=python)
    done = crab("exec", "w", "sleep 1000 & echo $!", env=python)
    assert "left running ends with it" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


# --- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("work:/a", Side("work", "/a")),
        ("work:", Side("work", "")),
        ("work:a:b", Side("work", "a:b")),
        ("./a:b", Side("", "./a:b")),
        ("/a:b", Side("", "/a:b")),
        ("plain", Side("", "plain")),
    ],
)
def test_sides_of_a_copy(text: str, expected: Side) -> None:
    assert side(text) == expected


def test_names_of_copies_and_sizes_for_people() -> None:
    assert [basename(path) for path in ("a/b", "a/b/", "a/.", "", "..", "~")] == ["b", "b", "", "", "", ""]
    assert [size(count) for count in (0, 999, 1500, 12_300_000, 5 * 10**10)] == [
        *("0 B", "999 B", "1.5 kB", "12.3 MB", "50.0 GB")
    ]
    assert line(Progress(1500, 3, 10_000)) == "1.5 kB of 10.0 kB, 3 files"


def test_files_are_kept_and_copied_in_every_direction(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "sub" / "file").write_text("deep")
    (tree / "run").write_text("#!/bin/sh\n")
    (tree / "run").chmod(0o755)
    said("new", "a", "--on", "bubblewrap")
    said("new", "b", "--on", "bubblewrap")
    said("cp", str(tree), "a:")
    said("cp", str(tree / "run"), "a:/workspace/other")
    assert said("exec", "a", "find . -type f -printf '%p %m\n' | sort") == (
        "./other 755\n./tree/run 755\n./tree/sub/file 644\n"
    )
    said("cp", "a:tree", "b:/workspace/copied")
    said("cp", "a:other", "b:")
    said("exec", "b", "ln -s /etc copied/out")
    assert "leads out of the tree" in refused("cp", "b:copied/.", str(tmp_path / "back"), code=125)
    said("cp", "--outward-links", "b:copied/.", str(tmp_path / "back"))
    assert (tmp_path / "back" / "sub" / "file").read_text() == "deep"
    assert os.access(tmp_path / "back" / "run", os.X_OK)
    assert said("exec", "b", "cat copied/sub/file; ls") == "deepcopied\nother\n"
    assert "NAME:PATH" in refused("cp", "here", "there")
    assert "No such file" in refused("cp", "a:nothing", str(tmp_path), code=125)
    said("rm", "a", "b")
    assert list((tmp_path / "home/.local/share/hermitcrab/sandboxes/bubblewrap").iterdir()) == []


# --- moving, forking, snapshots ------------------------------------------------------------------------


def test_a_named_session_moves_forks_and_is_kept(tmp_path: Path, home: Path) -> None:
    project = tmp_path / "project"
    (project / "sub").mkdir(parents=True)
    (project / "file").write_text("content\n")
    said("new", "m", "--on", "local", "--cwd", str(project))
    said("exec", "m", "cd sub; f() { cat ../file; }; v=1")
    assert said("move", "m", "--on", "bubblewrap") == "m is now on bubblewrap\n"
    assert said("exec", "m", "pwd; f; echo changed >../file; v=2") == "/workspace/sub\ncontent\n"
    kept = said("snapshot", "--label", "first", "m").strip()
    assert said("fork", "m", "2") == "m-1\nm-2\n"
    said("exec", "m-1", "echo one >../file; v=one")
    assert said("exec", "m-1", "f; echo $v") == "one\none\n"
    assert said("exec", "m-2", "f; echo $v") == "changed\n2\n"
    assert "there is a session named 'm-2'" in refused("fork", "m", "--names", "m-2")
    said("new", "again", "--snapshot", kept)
    assert said("exec", "again", "f; pwd") == "changed\n/workspace/sub\n"
    assert [each["label"] for each in json.loads(said("snapshot", "ls", "--json"))] == ["first"]
    said("snapshot", "rm", kept)
    assert "no snapshot" in crab("snapshot", "rm", kept).stderr
    assert "not empty" in refused("move", "m", "--on", "local", "--cwd", str(project))
    answer = said("move", "m", "--on", "local", "--cwd", str(tmp_path / "new"), "--keep-code")
    assert answer == f"m is now on local; its files are in {tmp_path}/new\n"
    assert said("exec", "m", "f; echo $v; pwd") == f"changed\n2\n{tmp_path}/new/sub\n"
    assert said("fork", "m", "--names", "copy") == "copy\n"
    said("exec", "copy", "rm ../file")
    assert said("exec", "m", "f") == "changed\n"
    crab("rm", "m", "m-1", "m-2", "again", "copy")
    assert sessions.every() == []
    assert (tmp_path / "new" / "file").exists()
    assert list((home / ".local/share/hermitcrab/forks").iterdir()) == []
    assert list((home / ".local/share/hermitcrab/sandboxes/bubblewrap").iterdir()) == []


def test_a_container_lives_on_between_commands_and_its_files_longer() -> None:
    needs_backend("docker")
    name = f"named{os.getpid()}"
    crab("new", name, "--on", f"docker:{engines.IMAGE}")
    try:
        said("exec", name, "echo kept >file; export v=1; touch /etc/installed; sleep 1000 & echo $! >pid")
        assert said("exec", name, "kill -0 $(cat pid) && ls /etc/installed") == "/etc/installed\n"
        with subprocess.Popen([*CRAB, "exec", name, "echo begun; sleep 1000"], stdout=-1) as process:
            assert process.stdout
            assert process.stdout.readline() == b"begun\n"
            process.kill()
        assert "still runs there" in crab("exec", name, "pkill -f 'sleep 1000'").stderr
        listed = registry.get("docker").sandboxes
        assert listed
        (container,) = [each.id for each in listed() if each.task == sessions.find(name).task]
        subprocess.run(["docker", "pause", container], check=True, capture_output=True)
        with subprocess.Popen([*CRAB, "exec", name, "ls /etc/installed"], stdout=-1, stderr=-1) as waiting:
            with pytest.raises(subprocess.TimeoutExpired):
                waiting.wait(1.5)
            subprocess.run(["docker", "unpause", container], check=True, capture_output=True)
            assert waiting.communicate(timeout=PATIENCE) == (b"/etc/installed\n", b"")
        # As a reboot would.
        subprocess.run(["docker", "rm", "--force", container], check=True, capture_output=True)
        command = "cat file; echo $v; ls /etc/installed 2>&- || [ $HOSTNAME = $(hostname) ] && echo new"
        assert said("exec", name, command) == "kept\n1\nnew\n"
    finally:
        done = crab("rm", name)
    assert done.stdout == f"removed {name}\n"
    assert sessions.every() == []


def test_what_a_killed_move_and_a_killed_fork_leave_is_removed(home: Path) -> None:
    needs_backend("docker")
    said("new", "k", "--on", "bubblewrap")
    said("exec", "k", "echo mine >file")
    killed("fork", "k", at="hermitcrab.store.Store.save_sessions")
    killed("move", "k", "--on", f"docker:{engines.IMAGE}", at="hermitcrab.moving.settle")
    noted = [each.what for each in Store().leftovers() if each.kind == TASK]
    task = noted[-1].removeprefix("docker/")
    listed = registry.get("docker").sandboxes
    assert listed
    assert task in [each.task for each in listed()]
    assert task in said("reap")
    assert task not in [each.task for each in listed()]
    assert [each.what for each in Store().leftovers() if each.kind == TASK] == []
    kept = (home / ".local/share/hermitcrab/sandboxes").glob("*/*")
    assert [each.name for each in kept] == [sessions.find("k").task]
    assert said("exec", "k", "cat file") == "mine\n"
    said("rm", "k")


def killed(*arguments: str, at: str) -> None:
    """A command whose program is killed when it comes to call that function."""
    module, name = at.rsplit(".", 1)
    code = f"""
import os, pkgutil, signal, sys
from hermitcrab import cli
setattr(pkgutil.resolve_name({module!r}), {name!r}, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
cli.main(sys.argv[1:])
"""
    done = subprocess.run([sys.executable, "-c", code, *arguments], timeout=PATIENCE, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done


def test_a_session_whose_sandbox_cannot_be_reached_can_be_forgotten() -> None:
    needs_backend("docker")
    name = f"lost{os.getpid()}"
    crab("new", name, "--on", f"docker:{engines.IMAGE}")
    nowhere = {"DOCKER_HOST": "unix:///nowhere.sock"}
    try:
        assert crab("rm", name, env=nowhere).returncode == 125
        assert sessions.find(name).name == name
    finally:
        crab("rm", name)
    with pytest.raises(ConfigError):
        sessions.find(name)


def test_the_library_uses_sessions_too() -> None:
    said("new", "lib", "--on", "local")
    with sessions.use("lib") as env:
        env.execute("v=1")
        waiting = threading.Event()
        with pytest.raises(KeyboardInterrupt), sessions.use("lib", waiting=_interrupted):
            waiting.set()
        assert not waiting.is_set()
    with sessions.use("lib") as env:
        assert env.execute("echo $v").output == "1\n"
    assert sessions.remove("lib") == ""


def _interrupted(name: str) -> None:
    raise KeyboardInterrupt
