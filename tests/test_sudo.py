"""sudo with a configured password: where `-A` goes, and the real thing on a host with Debian's sudo."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hermitcrab
from hermitcrab import ConfigError, HermitcrabWarning
from hermitcrab.backends import registry
from hermitcrab.config import SessionConfig, settings_for
from hermitcrab.policy import sudo
from hermitcrab.policy.scene import Scene
from hermitcrab.policy.sudo import REJECTED, with_askpass
from tests.sshd import USER, Sshd
from tests.sudo_parts import PASSWORD, machine
from tests.test_contract import needs_backend

SCENE = Scene("/work", {"HOME": "/home/u", "s": "sudo", "two": "sudo id"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("sudo id", "sudo -A id"),
        ("a; sudo id|b", "a; sudo -A id|b"),
        ("sudo -u bob id", "sudo -A -u bob id"),
        ("\\sudo id", "\\sudo -A id"),
        ("/usr/bin/sudo id", "/usr/bin/sudo -A id"),
        ("$s id", "$s -A id"),
        ("env A=1 sudo id", "env A=1 sudo -A id"),
        ("time sudo id", "time sudo -A id"),
        ("! sudo id", "! sudo -A id"),
        ("command sudo id", "command sudo -A id"),
        ("exec sudo id", "exec sudo -A id"),
        ("if sudo a; then sudo b; fi", "if sudo -A a; then sudo -A b; fi"),
        ('echo "$(sudo id)" `sudo id`', 'echo "$(sudo -A id)" `sudo -A id`'),
        ("diff <(sudo a) <(sudo b)", "diff <(sudo -A a) <(sudo -A b)"),
        ("[[ $(sudo a) ]] && sudo b &", "[[ $(sudo -A a) ]] && sudo -A b &"),
        ("find . -exec sudo a {} +", "find . -exec sudo -A a {} +"),
        ("ls | xargs -n1 sudo rm", "ls | xargs -n1 sudo -A rm"),
        ("f() { sudo id; }", "f() { sudo -A id; }"),
        ("é=1 sudo id # sudo", "é=1 sudo -A id # sudo"),
        ("sudo \\\n  id", "sudo -A \\\n  id"),
        ("cat <<E\n$(sudo id) sudo\nE", "cat <<E\n$(sudo -A id) sudo\nE"),
        ("sudo -k id", "sudo -A -k id"),
        ("sudo -l; sudo -v; sudo -i", "sudo -A -l; sudo -A -v; sudo -A -i"),
        ("sudo sudo id", "sudo -A sudo id"),
        ('sudo() { command sudo "$@"; }', 'sudo() { command sudo -A "$@"; }'),
    ],
)
def test_sudo_is_told_to_ask(text: str, expected: str) -> None:
    assert with_askpass(text, SCENE) == expected


@pytest.mark.parametrize(
    "text",
    [
        "echo sudo id",
        "echo 'sudo id'; echo \"sudo id\"",
        "bash -c 'sudo id'",
        "cat <<E\nsudo id\nE",
        "bash <<'E'\nsudo id\nE",
        "command -v sudo; which sudo; type sudo; man sudo; apt install sudo",
        "sudo -S id",
        "sudo -n id",
        "sudo -nu bob id",
        "sudo -A id",
        "sudo --askpass id",
        "sudo -k; sudo -K; sudo -V; sudo",
        "sudo() { echo mine; }; sudo id",
        "$two",
        "visudo; ./sudo-x; sudo=1",
        'git commit -m "no sudo here"',
        "echo $(( sudo ))",
    ],
)
def test_what_is_no_call_of_it_stays_as_it_is(text: str) -> None:
    assert with_askpass(text, SCENE) == text


def test_a_function_or_alias_of_the_session_is_left_alone() -> None:
    own = SCENE._replace(functions={"sudo": "{ echo mine; }"})
    assert with_askpass("sudo id; command sudo id", own) == "sudo id; command sudo -A id"
    assert with_askpass("sudo id", SCENE._replace(aliases={"sudo": "echo no"})) == "sudo id"
    assert with_askpass("sudo id", SCENE._replace(aliases={"sudo": "sudo "})) == "sudo -A id"
    assert (
        with_askpass("please id # sudo", SCENE._replace(aliases={"please": "sudo"})) == "please -A id # sudo"
    )


CALLS = st.sampled_from(
    [
        "sudo echo one",
        "sudo -u root echo 'sudo two'",
        "env A=sudo sudo echo three",
        "command sudo echo four",
        '\\sudo echo "five sudo"',
        "A=1 sudo sh -c 'echo sudo six'",
        "xargs sudo echo <<< seven",
        "time -p sudo echo eight 2>&1",
    ]
)
AROUND = st.sampled_from(
    [
        "{}",
        "{} | cat",
        "echo sudo | {{ {}; cat; }}",
        "if {}; then echo sudo; fi",
        "! {{ {}; }}",
        "( {} )",
        "{{ {}; }} 2>&1",
        "for sudo in 1 2; do {}; done",
        "while {}; do break; done",
        "case sudo in sudo) {};; esac",
        'echo "$({}) sudo"',
        "echo $({})",
        "x=$({}); echo $x",
        "cat <({})",
        "true && {} || echo sudo",
        "f() {{ {}; }}; f",
        "cat <<E; {}\nsudo in a document\nE\n",
        "cat <<'E'\nsudo \"in' a ( document\nE\n{}",
        "echo 'sudo; sudo' \"sudo | sudo\" # sudo\n{}",
        "{} & wait",
        "[[ -n $({}) ]] && echo sudo",
        '[ -n "$({})" ]',
        "export Y=$({}); echo $Y",
        "echo ${{unset:-$({})}}",
        "{} > /dev/stdout",
    ]
)
TEXTS = st.builds(lambda call, frames: _nested(call, frames), CALLS, st.lists(AROUND, max_size=3))
FAKE = (
    '#!/bin/bash\nprintf "%s\\n" "$1" >>"$LOG"\n[ "$1" = -A ] && shift\n[ "$1" = -u ] && shift 2\nexec "$@"\n'
)


def _nested(call: str, frames: list[str]) -> str:
    for frame in frames:
        call = frame.format(call)
    return call


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS)
def test_bash_agrees(tmp_path: Path, text: str) -> None:
    """With a sudo that writes down how it was called: each call was told to ask, and nothing else changed."""
    program = tmp_path / "sudo"
    if not program.exists():
        program.write_text(FAKE)
        program.chmod(0o755)

    def run(command: str) -> tuple[str, list[str]]:
        log = tmp_path / "log"
        log.write_text("")
        variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "TIMEFORMAT": ""}
        done = subprocess.run(
            ["bash", "-c", command], env=variables, capture_output=True, text=True, timeout=20, check=False
        )
        printed = [line for line in done.stdout.splitlines() if not line.startswith(("real", "user", "sys"))]
        return "\n".join(printed) + f"\n{done.returncode}", log.read_text().splitlines()

    plain, calls = run(text)
    asking, asked = run(with_askpass(text, Scene("/", {})))
    assert asking == plain
    assert asked == ["-A"] * len(calls)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    needs_backend("ssh")
    no_password = f"{USER} ALL=(ALL) NOPASSWD: /usr/bin/whoami"
    with machine(tmp_path_factory.mktemp("sudo") / "machine", no_password) as server:
        yield server


Opener = Callable[..., hermitcrab.Environment]


@pytest.fixture
def open_on(host: Sshd, quiet_home: Path) -> Iterator[Opener]:
    opened: list[hermitcrab.Environment] = []

    def open(**options: Any) -> hermitcrab.Environment:
        opened.append(hermitcrab.open("ssh", host="remote", config_file=host.config_file, **options))
        return opened[-1]

    yield open
    for each in opened:
        each.cleanup()


def failures(host: Sshd) -> int:
    return host.path("/run/sudo.log").read_text().count("incorrect password")


def left_behind(host: Sshd) -> list[str]:
    return [path for path in host.files() if "hermitcrab-sudo" in path]


def test_sudo_works_whatever_is_around_it(host: Sshd, open_on: Opener) -> None:
    env = open_on(sudo_password=PASSWORD)
    assert env.execute("id -un; sudo id -un").output == f"{USER}\nroot\n"
    assert env.execute("if ! sudo false; then echo $(sudo id -u)-$(env A=1 sudo id -u); fi").output == "0-0\n"
    assert env.execute("sudo -k; sudo id -u | cat").output == "0\n"
    assert env.execute("f() { sudo id -u; }").returncode == 0
    assert env.execute("f").output == "0\n"
    assert env.execute("sudo -u nobody id -un").output == "nobody\n"
    result = env.execute("echo 'sudo id'; sudo sh -c 'exit 3'")
    assert (result.output, result.returncode) == ("sudo id\n", 3)
    assert result.command == "echo 'sudo id'; sudo sh -c 'exit 3'"
    assert "line 2: nothing" in env.execute("sudo true\nnothing").output


def test_the_commands_input_is_its_own(open_on: Opener) -> None:
    env = open_on(sudo_password=PASSWORD)
    assert env.execute("sudo cat", stdin_data="one line\n").output == "one line\n"
    assert env.execute("echo piped | sudo cat").output == "piped\n"
    # Where no password is asked for, nobody gets it instead.
    assert env.execute("sudo whoami; cat", stdin_data="rest").output == "root\nrest"


def test_the_password_shows_nowhere(host: Sshd, open_on: Opener) -> None:
    env = open_on(sudo_password=PASSWORD)
    seen = env.execute(
        "sudo sh -c 'cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null' | tr '\\0' ' '; env; set; "
        "declare -f; sudo -l; set -x; sudo id"
    ).output
    assert "SUDO_ASKPASS=" in seen
    assert PASSWORD not in seen
    directory = env.execute('dirname "$SUDO_ASKPASS"').output.strip()
    listing = env.execute(f"stat -c '%a %U' {directory} {directory}/secret {directory}/askpass").output
    assert listing == f"700 {USER}\n600 {USER}\n700 {USER}\n"
    assert PASSWORD not in env.state.to_json()
    assert "SUDO_ASKPASS" not in env.state.variables
    assert left_behind(host)
    env.cleanup()
    assert left_behind(host) == []


def test_a_wrong_password_is_told_once_and_forgotten(host: Sshd, open_on: Opener) -> None:
    env = open_on(sudo_password="not it")
    before = failures(host)
    with pytest.warns(HermitcrabWarning, match="did not accept") as told:
        result = env.execute("sudo id; sudo id; sudo id")
    assert len(told) == 1
    assert result.output.count(REJECTED) == 1
    assert result.returncode == 1
    assert "not it" not in result.output
    assert failures(host) == before + 1
    assert left_behind(host) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = env.execute("sudo -k; sudo id")
    assert "terminal is required" in again.output
    assert failures(host) == before + 1
    assert env.execute("sudo whoami").output == "root\n"


def test_a_stream_tells_of_it_too(open_on: Opener) -> None:
    env = open_on(sudo_password="not it")
    running = env.stream("sudo id")
    assert REJECTED in "".join(running)
    with pytest.warns(HermitcrabWarning, match="did not accept"):
        assert running.wait().returncode == 1


def test_after_a_lost_connection_it_goes_on_and_nothing_is_left(host: Sshd, open_on: Opener) -> None:
    env = open_on(sudo_password=PASSWORD)
    first = left_behind(host)
    running = env.start("sleep 600")
    assert host.drop_connections()
    with pytest.raises(hermitcrab.SandboxLost):
        running.wait(20)
    assert env.execute("sudo id -u").output == "0\n"
    assert not set(first) & set(left_behind(host)), "the first one was not cleared away"


def test_without_a_password_nothing_is_changed(open_on: Opener) -> None:
    env = open_on()
    result = env.execute("sudo id; echo ${SUDO_ASKPASS-none}")
    assert "terminal is required" in result.output
    assert result.output.endswith("none\n")


def test_where_no_program_may_run_the_session_goes_on(
    quiet_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sudo, "_MAKE", "exit 1")
    with pytest.warns(HermitcrabWarning, match="sudo gets no password in this sandbox"):
        env = hermitcrab.open("local", sudo_password=PASSWORD)
    with env:
        assert env.execute("echo on ${SUDO_ASKPASS-none} # sudo").output == "on none\n"


def test_it_is_a_secret_in_every_setting() -> None:
    assert PASSWORD not in repr(SessionConfig(sudo_password=PASSWORD))
    setting = settings_for(registry.get("local"))["sudo_password"]
    assert setting.secret
    assert PASSWORD not in setting.shown(PASSWORD)
    with pytest.raises(ConfigError, match="sudo_password: takes one line") as refused:
        hermitcrab.open("local", sudo_password="two\nlines")
    assert "two" not in str(refused.value)
