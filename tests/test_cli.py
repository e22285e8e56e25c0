"""The command line, run as users run it: in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hermitcrab.cli import shell
from hermitcrab.cli.options import variables
from hermitcrab.cli.table import table
from hermitcrab.errors import ConfigError

SOURCE = Path(__file__).parent.parent / "src"
CRAB = [sys.executable, "-m", "hermitcrab.cli"]
PATIENCE = 20.0
RUN_TRUE_LIMIT = 0.250
ATTEMPTS = 20


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without settings, standing in a directory without any."""
    for name in [name for name in os.environ if name.startswith(("HERMITCRAB_", "XDG_"))]:
        if name != "HERMITCRAB_AGENT":
            monkeypatch.delenv(name)
    home = tmp_path / "home"
    project = tmp_path / "project"
    home.mkdir()
    project.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.chdir(project)
    return home


def crab(
    *arguments: str, stdin: bytes | None = b"", env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[bytes]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": PATIENCE, **options}
    return subprocess.run([*CRAB, *arguments], input=stdin, env={**os.environ, **(env or {})}, **options)


def start(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*CRAB, *arguments], **pipes)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def assert_ends(pid: int) -> None:
    limit = time.monotonic() + PATIENCE
    while is_alive(pid):
        assert time.monotonic() < limit, f"process {pid} still lives"
        time.sleep(0.01)


# --- run -----------------------------------------------------------------------------------------------


def test_run_shows_the_output_and_answers_with_the_exit_code() -> None:
    done = crab("run", "echo hello; exit 7")
    assert (done.stdout, done.stderr, done.returncode) == (b"hello\n", b"hermitcrab: local\n", 7)
    assert crab("run", "-q", "true").stderr == b""


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["echo a   b; echo $((1 + 1))"], b"a b\n2\n"),
        (["--", "echo a   b"], b"a b\n"),
        (["printf", "[%s]", "a   b", "$HOME", "--json"], b"[a   b][$HOME][--json]"),
        (["--", "printf", "%s|", "--", "-q"], b"--|-q|"),
    ],
)
def test_one_word_is_a_command_line_and_several_are_a_program(words: list[str], output: bytes) -> None:
    assert crab("run", "-q", *words).stdout == output


def test_stdout_and_stderr_stay_apart_when_they_go_apart() -> None:
    done = crab("run", "-q", "echo out; echo err >&2; echo out")
    assert (done.stdout, done.stderr) == (b"out\nout\n", b"err\n")


def test_stdout_and_stderr_keep_their_order_when_they_go_together() -> None:
    done = crab("run", "-q", "for i in 1 2 3; do echo o$i; echo e$i >&2; done", stderr=subprocess.STDOUT)
    assert done.stdout == b"o1\ne1\no2\ne2\no3\ne3\n"


def test_bytes_arrive_as_they_were_written(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "data").write_bytes(data)
    assert crab("run", "-q", "cat", str(tmp_path / "data")).stdout == data


def test_output_comes_while_the_command_runs_and_stdin_goes_as_it_comes() -> None:
    with start("run", "-q", "echo ready; read -r line; echo got $line", stdin=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"ready\n"
        process.stdin.write(b"this\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"got this\n"
        assert process.wait(PATIENCE) == 0  # although stdin was never closed


def test_stdin_is_exact_and_may_stay_unread() -> None:
    data = os.urandom(3 << 20)
    assert (
        crab("run", "-q", "sha256sum", stdin=data).stdout.split()[0].decode()
        == hashlib.sha256(data).hexdigest()
    )
    assert crab("run", "-q", "true", stdin=data).returncode == 0


def test_a_closed_stdin_is_an_empty_one() -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *CRAB, "run", "-q", "wc -c"],
        capture_output=True,
        timeout=PATIENCE,
    )
    assert (done.stdout.strip(), done.returncode) == (b"0", 0)


def test_cwd_and_variables(tmp_path: Path) -> None:
    options = ["--cwd", str(tmp_path), "--env", "A=1=2", "--env", "OURS"]
    done = crab("run", "-q", *options, 'echo "$PWD $A $OURS"', env={"OURS": "here"})
    assert done.stdout.decode() == f"{tmp_path} 1=2 here\n"
    assert crab("run", "--cwd", "/nowhere", "true").returncode == 2
    assert b"--env MISSING: not set here" in crab("run", "--env", "MISSING", "true").stderr


def test_a_time_out_answers_124() -> None:
    done = crab("run", "-q", "--timeout", "0.3", "echo before; sleep 100")
    assert (done.stdout, done.returncode) == (b"before\n", 124)
    assert done.stderr == b"[Command timed out after 0.3s]\n"
    assert crab("run", "--timeout", "0", "true").returncode == 2


def test_json_holds_the_whole_result() -> None:
    done = crab("run", "--json", "cat; echo err >&2; exit 3", stdin=b"in\n")
    assert done.stderr == b""
    result = json.loads(done.stdout)
    assert (result["output"], result["returncode"], done.returncode) == ("in\nerr\n", 3, 3)
    assert (result["backend"], result["outcome"], result["stdout"]) == ("local", "completed", None)
    assert result["usage"].keys() == {"user_seconds", "system_seconds", "peak_memory_bytes"}
    apart = json.loads(crab("run", "--json", "--separate", "echo out; echo err >&2").stdout)
    assert (apart["stdout"], apart["stderr"]) == ("out\n", "err\n")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_the_command_and_cleans_up(number: signal.Signals, code: int) -> None:
    with start("run", "-q", "setsid sleep 1000 & echo $!; echo $$; wait") as process:
        assert process.stdout
        children = [int(process.stdout.readline()) for _ in range(2)]
        process.send_signal(number)
        assert process.wait(PATIENCE) == code
        assert process.stderr
        assert b"Traceback" not in process.stderr.read()
    for pid in children:
        assert_ends(pid)


def test_a_second_interrupt_does_not_wait_for_the_grace() -> None:
    environ = {**os.environ, "HERMITCRAB_KILL_GRACE": "1000"}
    with start("run", "-q", "trap '' TERM INT; echo $$; while :; do sleep 1; done", env=environ) as process:
        assert process.stdout
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    assert_ends(child)


def test_a_broken_pipe_is_quiet() -> None:
    script = f'{" ".join(CRAB)} run -q "echo \\$\\$ >pid; exec yes" | head -n 1; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=PATIENCE)
    assert (done.stdout, done.stderr, done.returncode) == (b"y\n", b"", 141)
    assert_ends(int(Path("pid").read_text()))


def test_errors_are_one_line_and_no_traceback(tmp_path: Path) -> None:
    done = crab("run", "--on", "lokal", "true")
    assert done.returncode == 2
    assert re.fullmatch(rb"hermitcrab: .*'lokal', did you mean 'local'\?.*\n", done.stderr)
    assert crab("run").returncode == 2
    assert crab("no-such-command").returncode == 2
    tools = tmp_path / "tools"
    tools.mkdir()
    bash = shutil.which("bash")
    assert bash
    (tools / "bash").symlink_to(bash)
    missing = crab("run", "--on", "bubblewrap", "true", env={"PATH": str(tools)})
    assert missing.returncode == 125
    assert re.fullmatch(rb"hermitcrab: .*bwrap.*\n  hint: .*[Ii]nstall.*\n", missing.stderr)


def test_a_warning_is_one_line_for_people(home: Path) -> None:
    (home / ".bash_profile").write_text("kill -9 $$")
    done = crab("run", "-q", "echo fine")
    assert done.stdout == b"fine\n"
    assert done.stderr.startswith(b"hermitcrab: warning: the login profile ")
    assert done.stderr.count(b"\n") == 1


def test_a_named_environment_is_used_and_shown() -> None:
    Path("hermitcrab.toml").write_text(
        "default = 'ci'\n[environments.ci]\nbackend = 'local'\nenv = {A = 'b'}\n"
    )
    done = crab("run", "--on", "ci", "echo $A")
    assert (done.stdout, done.stderr) == (b"b\n", b"hermitcrab: ci (local)\n")
    assert crab("run", "echo $A").stdout == b"b\n"


def test_the_command_line_starts_without_what_it_does_not_need() -> None:
    heavy = {"asyncio", "importlib.metadata", "hermitcrab.environment", "hermitcrab.config", "tomllib"}
    program = f"import sys, hermitcrab.cli; print(sorted({heavy!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.slow
@pytest.mark.skipif("os.environ.get('HERMITCRAB_AGENT') == 'python'", reason="promised for the C agent")
def test_run_true_starts_within_its_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled, as an installed package is. Once is enough: the promise is about us, not the machine."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "compiled"))

    def once() -> float:
        before = time.perf_counter()
        crab("run", "-q", "true")
        return time.perf_counter() - before

    took: list[float] = []
    while len(took) < ATTEMPTS and min(took, default=RUN_TRUE_LIMIT) >= RUN_TRUE_LIMIT:
        took.append(once())
    if min(took) >= RUN_TRUE_LIMIT and os.getloadavg()[0] > (os.cpu_count() or 1):
        pytest.skip(f"this machine is busy with other things: {min(took):.3f} s at best")
    assert min(took) < RUN_TRUE_LIMIT


# --- shell ---------------------------------------------------------------------------------------------


def test_shell_reads_lines_of_one_session() -> None:
    lines = (
        b"cd /tmp\nX='a b'\n\nf() {\necho \"$X in $PWD\"\n}\nf\ncat <<end\nhere\nend\necho a \\\nb\nfalse\n"
    )
    done = crab("shell", stdin=lines)
    assert (done.stdout, done.stderr, done.returncode) == (b"a b in /tmp\nhere\na b\n", b"", 1)


def test_shell_ends_at_once_when_it_is_told_to_terminate() -> None:
    with start("shell", stdin=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"echo $$; exec sleep 1000\necho not reached\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 143
        assert process.stdout.read() == b""
    assert_ends(child)


def test_shell_takes_bytes_that_are_no_text() -> None:
    assert crab("shell", stdin=b"printf '\xff\xfe'\n", env={"PYTHONUTF8": "1"}).stdout == b"\xff\xfe"


def test_shell_leaves_by_exit() -> None:
    assert crab("shell", stdin=b"exit 3\necho not reached\n").returncode == 3
    assert crab("shell", stdin=b"(exit 4)\nexit\n").returncode == 4
    assert crab("shell", stdin=b"echo 'unfinished").returncode == 2


@pytest.mark.parametrize(
    "text", ["echo 'a", "if true", "cat <<x", "echo a \\", "f() {", "a && ", "echo $(", "case x in"]
)
def test_an_unfinished_command_waits_for_more(text: str) -> None:
    assert shell.is_unfinished(text)


@pytest.mark.parametrize(
    "text", ["echo a", "if true; then :; fi", "cat <<x\nx", "echo a \\\\", ")", "fi", "echo '", ""]
)
def test_a_finished_or_wrong_command_does_not(text: str) -> None:
    assert shell.is_unfinished(text) == (text == "echo '")


class Terminal:
    """`hermitcrab shell` on a terminal of its own."""

    def __init__(self, *options: str) -> None:
        self.screen = ""
        self.left = False
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            os.execve(sys.executable, [*CRAB, "shell", *options], {**os.environ, "TERM": "dumb"})

    def resize(self, rows: int, columns: int) -> None:
        termios.tcsetwinsize(self.descriptor, (rows, columns))

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def see(self, pattern: str, *, pressing: str = "") -> None:
        """Wait until it shows, pressing a key now and then, and forget everything up to there."""
        limit = time.monotonic() + PATIENCE
        while not (found := re.search(pattern, self.screen)):
            assert time.monotonic() < limit, f"no {pattern!r} in {self.screen!r}"
            if select.select([self.descriptor], [], [], 0.5)[0]:
                self.screen += os.read(self.descriptor, 4096).decode()
            elif pressing:
                self.type(pressing)
        self.screen = self.screen[found.end() :]

    def wait(self) -> int:
        limit = time.monotonic() + PATIENCE
        while (status := os.waitpid(self.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < limit, f"it does not leave: {self.screen!r}"
            time.sleep(0.01)
        self.left = True
        return os.waitstatus_to_exitcode(status[1])


@pytest.fixture
def terminal(home: Path, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    terminal = Terminal(*getattr(request, "param", ()))
    try:
        yield terminal
    finally:
        os.close(terminal.descriptor)
        if not terminal.left:
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)


def test_shell_on_a_terminal(terminal: Terminal, home: Path) -> None:
    terminal.see(r"project\$ ")  # what comes before may not fit
    terminal.type("cd /tmp\n")
    terminal.see(r"local:/tmp\$ ")
    terminal.type("echo started; sleep 1000\n")
    terminal.see(r"\nstarted\r\n")
    terminal.type("\x03")
    terminal.see(r"Command interrupted")
    terminal.see(r"local:/tmp\$ ")
    # Python notices a signal that comes just before readline waits only at the next key.
    terminal.type("half a line\x03")
    terminal.see(r"local:/tmp\$ ", pressing="\x03")
    terminal.type("echo 'two\n")
    terminal.see(r"> ")
    terminal.type("lines'\n")
    terminal.see(r"\ntwo\r\nlines\r\n")
    terminal.see(r"local:/tmp\$ ")
    terminal.type("\x04")
    assert terminal.wait() == 0
    history = home / ".local/state/hermitcrab/history"
    assert "cd /tmp" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.parametrize("terminal", [["--pty"]], indirect=True)
def test_a_terminal_in_the_sandbox(terminal: Terminal) -> None:
    terminal.resize(33, 101)
    terminal.see(r"leaves\r?\n")
    terminal.see(r"[#$] ")
    terminal.type("PS1='ready> '; stty size\r")
    terminal.see(r"\n33 101\r\n")
    terminal.resize(44, 122)
    terminal.type("until test \"$(stty size)\" = '44 122'; do sleep 0.05; done; echo resi''zed\r")
    terminal.see(r"\nresized\r\n")
    terminal.type("echo in fr''ont; cat\r")
    terminal.see(r"\nin front\r\n")
    terminal.type("to be interrupted\r")
    terminal.see("to be interrupted\r\nto be interrupted")
    terminal.type("\x03")
    terminal.see("ready> ")
    terminal.type("exit 6\r")
    assert terminal.wait() == 6


def test_a_terminal_needs_one() -> None:
    done = crab("shell", "--pty")
    assert done.returncode == 2
    assert b"needs a terminal" in done.stderr


# --- doctor, backends, config, setup -------------------------------------------------------------------


def test_doctor_is_a_table_and_answers_for_the_default() -> None:
    done = crab("doctor")
    assert done.returncode == 0
    text = done.stdout.decode()
    assert re.search(r"^local \(default\) +yes ", text, re.M)
    assert re.search(r"^bubblewrap +(yes|no) ", text, re.M)
    assert re.search(r"^bash +yes +\d", text, re.M)
    report = json.loads(crab("doctor", "--json").stdout)
    assert report["default"] == "local"
    assert report["usable"] is True
    assert set(report["backends"]) >= {"local", "bubblewrap"}
    assert {part["name"] for part in report["parts"]} >= {"python", "bash", "agent"}


def test_doctor_says_what_to_do(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    done = crab("doctor", "--on", "bubblewrap", env={"PATH": str(empty)})
    assert done.returncode == 1
    assert re.search(rb"^bubblewrap \(default\) +no .*[Ii]nstall", done.stdout, re.M)
    assert re.search(rb"^bash +no +not on PATH", done.stdout, re.M)
    python = crab("doctor", env={"HERMITCRAB_AGENT": "python"})
    assert re.search(rb"^agent +no .*HERMITCRAB_AGENT=python", python.stdout, re.M)


def test_doctor_reports_a_wrong_config_file() -> None:
    Path("hermitcrab.toml").write_text("[environments.ci]\nbackend = 'nowhere'\n")
    done = crab("doctor")
    assert done.returncode == 0
    assert re.search(rb"^config +no .*hermitcrab.toml:2.*'nowhere'", done.stdout, re.M)
    Path("hermitcrab.toml").write_text("nonsense")
    assert crab("doctor").returncode == 1


def test_backends_lists_what_each_can_do() -> None:
    text = crab("backends").stdout.decode()
    assert re.search(r"^backend +from +isolated +network", text)
    assert re.search(r"^local +built in +no ", text, re.M)
    assert re.search(r"^bubblewrap +built in +yes ", text, re.M)
    names = [each["name"] for each in json.loads(crab("backends", "--json").stdout)]
    assert names[:2] == ["local", "bubblewrap"]


def test_config_shows_values_and_sources_but_no_secrets() -> None:
    Path("hermitcrab.toml").write_text("[session]\ntimeout = 5\nenv = {TOKEN = 'hunter2'}\n")
    done = crab("config", env={"HERMITCRAB_KILL_GRACE": "2"})
    text = done.stdout.decode()
    assert done.returncode == 0
    assert "hunter2" not in text
    assert re.search(r"^session +env +TOKEN=\*\*\* +/.*hermitcrab.toml:3: \[session\]$", text, re.M)
    assert re.search(r"^session +timeout +5.0 +/.*hermitcrab.toml:2: \[session\]$", text, re.M)
    assert re.search(r"^session +kill_grace +2.0 +HERMITCRAB_KILL_GRACE$", text, re.M)
    assert re.search(r"^session +shell +'bash' +default$", text, re.M)
    shown = json.loads(crab("config", "--json", "--on", "bubblewrap").stdout)
    assert (shown["on"], shown["chosen_by"]) == ("bubblewrap", "argument")
    assert {"section": "bubblewrap", "key": "network", "value": "False", "from": "default"} in shown[
        "settings"
    ]


def test_config_names_everything_that_is_wrong() -> None:
    Path("hermitcrab.toml").write_text("[session]\ntimeuot = 5\nshell = 3\n")
    done = crab("config")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2


def test_config_path(home: Path) -> None:
    Path("hermitcrab.toml").write_text("")
    rows = json.loads(crab("config", "path", "--json").stdout)
    assert rows == [
        {"which": "user", "path": str(home / ".config/hermitcrab/hermitcrab.toml"), "exists": False},
        {"which": "project", "path": str(Path.cwd() / "hermitcrab.toml"), "exists": True},
    ]


def test_setup_with_piped_answers(home: Path) -> None:
    path = home / ".config/hermitcrab/hermitcrab.toml"
    answers = b"nowhere\nuser\nlocla\nlocal\nsoon\n90\n"
    done = crab("setup", stdin=answers)
    assert done.returncode == 0, done.stderr
    assert f"wrote {path}".encode() in done.stdout
    shown = json.loads(crab("config", "--json").stdout)
    assert (shown["on"], shown["chosen_by"]) == ("local", str(path))
    assert {"key": "timeout", "value": "90.0"}.items() <= shown["settings"][1].items()


def test_setup_never_replaces_a_file_unasked() -> None:
    path = Path("hermitcrab.toml")
    assert crab("setup", "--yes", "--project").returncode == 0
    first = path.read_text()
    assert crab("config").returncode == 0
    refused = crab("setup", "--yes", "--project")
    assert refused.returncode == 2
    assert b"is left as it is" in refused.stderr
    assert crab("setup", "--project", stdin=b"no\n").returncode == 0
    assert crab("setup", "--project", stdin=b"").returncode == 0
    assert path.read_text() == first
    assert crab("setup", "--project", stdin=b"yes\nlocal\n7\n").returncode == 0
    assert "timeout = 7\n" in path.read_text()


def test_help_helps() -> None:
    text = crab("--help").stdout.decode()
    assert "examples:" in text
    for name in ("run", "shell", "doctor", "backends", "config", "setup", "bench"):
        assert re.search(rf"^ +{name} +\w", text, re.M)
    assert b"--timeout SECONDS" in crab("run", "--help").stdout
    assert crab().returncode == 2


def test_variables() -> None:
    assert variables(["A=1", "B=", "C"], {"C": "3"}) == {"A": "1", "B": "", "C": "3"}
    with pytest.raises(ConfigError, match="D=VALUE"):
        variables(["D"], {})


def test_table() -> None:
    assert table(("a", "b"), [("long", "x\ny"), ("", "z")]) == "a     b\nlong  x y\n      z"
