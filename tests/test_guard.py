"""The guard: what it refuses, what it lets pass, when it is on, whom it asks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import CommandRefused
from hermitcrab.config import resolve
from hermitcrab.core.state import ShellState, Variable
from hermitcrab.policy import guard as guard_module
from hermitcrab.policy.guard import Guard, guard_for
from hermitcrab.policy.rules import RULES
from tests import engines
from tests.test_contract import needs_backend

SSH: dict[str, Any] = dict(engines.SSH)
STATE = ShellState(
    cwd="/work",
    variables={"HOME": Variable("/home/u", "x"), "USER": Variable("u", "x"), "BUILD": Variable("/work/b")},
)


def rule(command: str, cwd: str = "") -> str | None:
    return Guard().would_refuse(command, STATE, cwd, dict)


REFUSED = {
    "wipe": [
        "rm -rf /",
        "rm -rf /*",
        "rm -fr -- /etc",
        "rm -r --force ~/*",
        "rm -rf $HOME",
        "rm -rf ~",
        'rm -rf "$UNSET"/*',
        '[ -n "$UNSET" ] && echo x; rm -rf "$UNSET"/*',
        "rm > /dev/null -rf /",
        "ls\n\\rm -rf /",
        "echo `ls` `rm -rf /`",
        'git commit -m "$(cat <<EOF\nit\'s (fine\nEOF\n)"; rm -rf /',
        "{ cat <<E; rm -rf /; }\ndocument\nE",
        "time { rm -rf /; }",
        "rm -rf //",
        "rm -rf /usr/../etc/",
        "rm -rf /{bin,etc}",
        "rm -rf /us?",
        "rm -rf ..",
        "rm -rf /home/u",
        "rm -rf ~u",
        "rm -f /bin/*",
        "/bin/rm -rf /",
        "sudo rm -rf / --no-preserve-root",
        "r=rm; $r -rf /",
        "a=r b=m; $a$b -rf /",
        "r\\m -rf /",
        "'rm' -rf /",
        "$'\\x72m' -rf /",
        "echo / | xargs rm -rf",
        "xargs -I{} rm -rf {} <<< /",
        "bash -c 'rm -rf /'",
        "sh -c 'cd /; rm -rf *'",
        'eval "rm -rf /"',
        "echo 'rm -rf /' | sh",
        "cat <<EOF | bash\nrm -rf /\nEOF",
        "bash <<EOF\nrm -rf $HOME\nEOF",
        "cd / && rm -rf *",
        "cd; rm -rf *",
        "cd /; rm -rf .",
        "x=$(rm -rf /)",
        'f() { rm -rf "$1"; }; f /',
        "wipe() { rm -rf /; }",
        'for d in /*; do rm -rf "$d"; done',
        "trap 'rm -rf /' EXIT",
        "alias x='rm -rf /'",
        "env -C / rm -rf ./etc",
        "find / -delete",
        "find / -type f -exec rm {} +",
        "find ~ -name '*' -delete",
        "chmod -R 000 /",
        "chown -R u /etc",
        "mv / /x",
        "mv /* /tmp",
        "mv ~ /tmp/x",
        "rsync -a --delete empty/ /",
        "nohup nice -n 5 timeout 9 setsid stdbuf -o0 rm -rf / &",
        "busybox rm -rf /",
        "if true; then rm -rf /; fi",
        "true && { ! time rm -rf /; }",
        "a || rm -rf ~",
        "[ -d / ] && rm -rf /*",
        "[[ -n $x && -d ~ ]] || rm -rf ~",
        "echo == clean ==; rm -rf /",
        "find / -type f | xargs rm -f",
        "find ~ -print0 | sudo xargs -0 rm -rf",
        "ls -d /* | xargs rm -rf",
        "cd /; ls | xargs rm -rf",
        "for f in $(ls /); do rm -rf /$f; done",
        "rm -rf /home/$(whoami)",
        "$(which rm) -rf /",
        "truncate -s 0 /etc/*",
    ],
    "disk": [
        "dd if=/dev/zero of=/dev/sda",
        "cd /dev; dd if=zero of=nvme0n1",
        "mkfs.ext4 /dev/sda1",
        "mkfs -t ext4 /dev/vdb",
        "wipefs -a /dev/sda",
        "cat x > /dev/sda",
        "> /dev/sda",
        "blkdiscard /dev/nvme0n1",
        "fdisk /dev/sda",
        "parted -s /dev/sda mklabel gpt",
        "shred /dev/sd*",
        "cp image /dev/mmcblk0",
        "cat image | sudo tee /dev/sdb",
        "d=/dev/sda; dd of=$d < image",
        "cryptsetup luksFormat /dev/sda2",
        "badblocks -wsv /dev/sda",
    ],
    "kill-all": [
        *("kill -9 -1", "kill -KILL -- -1", "kill -s 9 -1", "killall5 -9", "pkill -9 .", "pkill -u u"),
        *('pkill -u "$(whoami)"', "pkill -9 -u $(id -u)", "killall -u $UID"),
        *("kill -9 $(ps -e -o pid=)", "ps aux | awk '{print $2}' | xargs kill"),
    ],
    "fork-bomb": [":(){ :|:& };:", "bomb() { bomb | bomb & }; bomb", "while :; do sleep 9 & done"],
    "power": [
        "reboot",
        "/sbin/reboot",
        "sudo halt -p",
        "shutdown -h now",
        "shutdown",
        "init 0",
        "telinit 6",
        "systemctl poweroff",
        "sudo systemctl --force reboot",
        "systemctl isolate reboot.target",
        "echo b > /proc/sysrq-trigger",
        "echo b | sudo tee /proc/sysrq-trigger",
        "su -c reboot",
        "echo hello; poweroff -f",
        "ls\nreboot",
        "$(command -v reboot)",
        "cd /sbin; ./reboot",
        "reboot() { sudo reboot; }; reboot",
    ],
}


@pytest.mark.parametrize(
    ("command", "name"), [(command, name) for name, commands in REFUSED.items() for command in commands]
)
def test_a_catastrophe_is_seen(command: str, name: str) -> None:
    assert rule(command) == name


@pytest.mark.parametrize(
    "command",
    [
        "man mkfs",
        "git commit -m 'rm -rf /'",
        "echo reboot",
        "kill -1 1234",
        "kill -9 -- -1234",
        "kill -l",
        "pkill -f myserver",
        "killall firefox",
        "rm -rf ./build",
        "rm -rf /tmp/x",
        "rm -rf *",
        'rm -rf "${UNSET:?}"/*',
        "rm -rf $BUILD/*",
        "rm -rf ~/.cache $HOME/build /home/u/x /usr/local/lib/x",
        "rm /etc/motd",
        "read X; rm -rf $X/*",
        ". ./settings; rm -rf $PREFIX/*",
        '[ -n "$UNSET" ] && rm -rf "$UNSET"/*',
        "if [[ -d $UNSET ]]; then rm -rf $UNSET/*; fi",
        '[ -z "$UNSET" ] && exit 1; rm -rf $UNSET/*',
        'test -n x; [ "$UNSET" ] || { echo no; exit 1; }; rm -rf $UNSET/*',
        ': "${UNSET:?}"; rm -rf $UNSET/*',
        ': "${UNSET:=build}"; rm -rf $UNSET/*',
        "set -euo pipefail; rm -rf $UNSET/*",
        'mapfile -t all < list; rm -rf "${all[@]}"/*',
        'read -ra all; rm -rf "${all[0]}"/*',
        'all[1]=x; rm -rf "${all[1]}"/* "${all[@]}"/*',
        "((n = 3)); rm -rf /$n",
        'eval "$(tool env)"; rm -rf $UNSET/*',
        "builtin cd /tmp; rm -rf *",
        "grep -r reboot /etc",
        "systemctl status",
        "systemctl restart nginx",
        "ls; # rm -rf /",
        "cat <<EOF\nrm -rf /\nEOF",
        "{ cat <<EOF; ls; }\nrm -rf /\nEOF",
        "git commit -m \"$(cat <<'EOF'\nit's (not `reboot`\nrm -rf /\nEOF\n)\"",
        "cat > x.sh <<'EOF'\nreboot\nEOF",
        "x='rm -rf /'; echo \"$x\"",
        "printf '%s' 'rm -rf /' > x.sh",
        "python -c \"print('rm -rf /')\"",
        "docker run --rm debian rm -rf /",
        "find . -delete",
        "find / -name '*.pyc' -delete",
        "find /etc -type f",
        "chmod -R u+w ~/x .",
        "chown -R u ~",
        "mv /tmp/x ~/",
        "rsync -a --delete a/ b/",
        "dd if=/dev/sda of=image",
        "dd if=image of=/dev/null",
        "mkfs.ext4 disk.img",
        "fdisk -l /dev/sda",
        "parted /dev/sda print",
        "wipefs /dev/sda",
        "cat /dev/sda > x",
        "ls /dev/sda > /dev/null",
        "shutdown -c",
        "reboot --help",
        "command -v reboot; which reboot",
        "sudo -l reboot",
        "f() { a | b & }; f",
        "while true; do a & sleep 1; done",
        "alias rm='rm -i'",
        "git rm -r .",
        'die() { exit 1; }; f() { [ $# -ge 1 ] || die; rm -rf "$1"/*; }; f "$@"',
        '[ "$x" = / ] && echo "no; rm -rf /"',
        "find . -type f | xargs rm -f",
        "find / -name core | xargs rm -rf",
        "ls | xargs rm -rf",
        "./shutdown; bin/reboot; ./init 0",
        "shutdown() { kill $pid; }; trap shutdown TERM",
        "trap halt EXIT; main() { halt; }; halt() { exit 1; }; main",
        "truncate -s 0 /var/log/*",
        'pkill -u "$(whoami)" firefox',
        "ps aux | grep node | awk '{print $2}' | xargs kill -9",
        "ps -C node -o pid= | xargs kill",
        "ps aux | awk '/node/ {print $2}' | xargs kill",
    ],
)
def test_ordinary_work_passes(command: str) -> None:
    assert rule(command) is None


def test_the_directory_of_the_command_counts() -> None:
    assert rule("rm -rf .", "/") == "wipe"
    assert rule("rm -rf ./*", "/etc") == "wipe"
    assert rule("rm -rf *", "~") == "wipe"
    assert rule("rm -rf *", "/tmp/x") is None


def test_the_quick_look_knows_the_programs_of_the_rules() -> None:
    for each in RULES:
        for program in each.programs:
            assert Guard().might_matter(f"{program.replace('*', '.ext4')} /dev/sda"), program
            if each.name != "disk" and program != "tee":
                assert Guard().might_matter(program), program


def test_the_quick_look_is_quick_and_loads_no_parser() -> None:
    code = (
        "import sys; from hermitcrab.policy.guard import Guard; "
        "assert not Guard().might_matter('cd src && make -j4 2>/dev/null; echo \"$HOME\"'); "
        "assert not {'tree_sitter', 'tree_sitter_bash', 'hermitcrab.policy.grammar'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    look = Guard().might_matter
    text = "python -m pytest tests/test_x.py -k 'a or b'"

    def seconds() -> float:
        began = time.perf_counter()
        for _ in range(1000):
            look(text)
        return (time.perf_counter() - began) / 1000

    assert min(seconds() for _ in range(20)) < 20e-6  # 3 us on a quiet machine


def test_a_megabyte_is_checked_in_bounded_time() -> None:
    line = "rm -rf ./x; echo 'a line of text with $HOME in it'\n"
    began = time.monotonic()
    assert rule(line * 20_000) is None
    assert rule(line * 20_000 + "reboot\n" + line) in (None, "power")
    assert rule("echo " + "x" * (1 << 20) + "; reboot") in (None, "power")
    assert time.monotonic() - began < 10


def test_a_text_that_does_not_parse_is_judged_on_the_safe_side() -> None:
    assert rule("if true; then rm -rf /") == "wipe"
    assert rule("echo )) ; rm -rf / ; ((") == "wipe"
    assert rule("ls (; reboot") == "power"


def test_rules_of_the_user() -> None:
    guard = Guard(["git push", "docker * --privileged", "/opt/tool/run x*"], ["terraform apply *", "curl"])

    def refuses(command: str) -> str | None:
        return guard.would_refuse(command, STATE, "", dict)

    assert refuses("git push") == "deny: git push"
    assert refuses("cd x && sudo /usr/bin/git push origin main") == "deny: git push"
    assert refuses("g=git; $g 'push'") == "deny: git push"
    assert refuses("docker run -it --privileged debian") == "deny: docker * --privileged"
    assert refuses("/opt/tool/run xy") == "deny: /opt/tool/run x*"
    assert (
        refuses("terraform apply") == refuses("terraform apply -auto-approve") == "confirm: terraform apply *"
    )
    assert refuses("echo x | xargs curl") == "confirm: curl"
    for harmless in ("git pushy", "git status", "docker run debian", "terraform plan", "echo git push"):
        assert refuses(harmless) is None
    assert refuses("reboot") == "power"
    assert Guard(["git *"], catastrophes=False).would_refuse("reboot", STATE, "", dict) is None
    assert Guard(["* --force"]).would_refuse("make --force all", STATE, "", dict) == "deny: * --force"


def on(backend: str, **options: object) -> Guard | None:
    return guard_for(resolve(backend, options, cwd=Path.cwd(), environ={}))


def test_it_is_on_where_something_of_the_hosts_is_at_stake(quiet_home: Path) -> None:
    volume = f"{quiet_home}:/data"
    assert on("local")
    assert on("ssh", host="h")
    assert on("bubblewrap") is None
    assert on("bubblewrap", workspace=str(quiet_home))
    assert on("docker", image="debian") is None
    assert on("docker", image="debian", volumes=[volume])
    assert on("docker", image="debian", volumes=[f"{volume}:ro"]) is None
    assert on("docker", image="debian", auto_mount_cwd=True)
    assert on("podman", image="debian", volumes=[volume])
    assert on("apptainer", image="x.sif") is None
    assert on("apptainer", image="x.sif", volumes=[volume])
    assert on("local", guard=False) is None
    assert on("local", guard=False, guard_deny=["x"]) is None
    assert on("bubblewrap", guard=True)


def test_user_rules_hold_everywhere_and_bring_no_others(quiet_home: Path) -> None:
    guard = on("bubblewrap", guard_deny=["git push"])
    assert guard is not None
    assert guard.would_refuse("git push", STATE, "", dict) == "deny: git push"
    assert guard.would_refuse("rm -rf /", STATE, "", dict) is None


@pytest.fixture
def asked() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def env(quiet_home: Path, asked: list[tuple[str, str]]) -> Iterator[hermitcrab.Environment]:
    def confirm(command: str, rule: str) -> bool:
        asked.append((command, rule))
        return "yes" in command

    with hermitcrab.open(
        "local", guard_deny=["git push"], guard_confirm=["touch *"], confirm=confirm
    ) as environment:
        yield environment


def test_nothing_of_a_refused_command_runs(env: hermitcrab.Environment, quiet_home: Path) -> None:
    for start in (env.execute, env.stream, env.start):
        with pytest.raises(CommandRefused, match=r"`reboot` would power off, .*\(rule 'power'\)") as refused:
            start("mkdir made; reboot")
        assert refused.value.rule == "power"
    assert not Path("made").exists()
    assert env.would_refuse("mkdir made; reboot") == "power"
    assert env.execute("echo still here").output == "still here\n"


def test_what_the_session_knows_counts(env: hermitcrab.Environment) -> None:
    env.execute("r=rm; cd /; p=(-r -f)")
    assert env.would_refuse("$r -rf etc") == "wipe"
    assert env.would_refuse("rm -rf *") == "wipe"
    assert env.would_refuse("rm -rf *", "/var/cache") is None
    assert env.would_refuse("$r ${p[@]} usr") == "wipe"
    assert env.would_refuse("r=echo; $r -rf /") is None


def test_the_callback_is_asked_and_obeyed(env: hermitcrab.Environment, asked: list[tuple[str, str]]) -> None:
    assert env.would_refuse("touch x") is None
    assert asked == []
    assert env.execute("touch yes; ls").output == "yes\n"
    with pytest.raises(CommandRefused, match="needs a yes, and the answer was no"):
        env.execute("sudo touch no")
    assert asked == [("touch yes; ls", "confirm: touch *"), ("sudo touch no", "confirm: touch *")]
    assert not Path("no").exists()


def test_what_it_says_tells_no_forwarded_value(quiet_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "s3cret")
    monkeypatch.setenv("NO_VALUE", "")
    with hermitcrab.open("local", guard_deny=["curl"], forward_env=["API_TOKEN", "NO_VALUE"]) as env:
        for command in ('curl -H "X: $API_TOKEN" u', 'x=$API_TOKEN; sh -c "curl ${x#s}"'):
            with pytest.raises(CommandRefused, match="deny: curl") as refused:
                env.execute(command)
            assert "3cret" not in str(refused.value)
        assert env.would_refuse('rm -rf "$NO_VALUE"/*') == "wipe"
        assert env.would_refuse('rm -rf "$API_TOKEN"/*') is None


def test_without_anybody_to_ask_it_is_refused(quiet_home: Path) -> None:
    with hermitcrab.open("local", guard_confirm=["touch *"]) as env:
        assert env.would_refuse("touch x") == "confirm: touch *"
        with pytest.raises(CommandRefused, match="there is nobody to ask"):
            env.execute("touch x")


def test_the_same_with_asyncio_and_off(quiet_home: Path) -> None:
    async def run() -> None:
        async with hermitcrab.aopen("local", guard_confirm=["touch *"], confirm=lambda *_: True) as env:
            assert env.would_refuse("reboot") == "power"
            assert (await env.execute("touch x; ls")).output == "x\n"
            with pytest.raises(CommandRefused):
                await env.execute("cd / && rm -rf *")
        async with hermitcrab.aopen("local", guard=False) as env:
            assert env.would_refuse("reboot") is None

    asyncio.run(run())


def test_it_follows_a_session_that_moves(quiet_home: Path) -> None:
    state = replace(STATE, cwd="/tmp")
    with hermitcrab.open("local", state=state) as env:
        assert env.would_refuse("rm -rf $BUILD") is None
        assert env.would_refuse("rm -rf ~") == "wipe"


def test_on_a_remote_host(quiet_home: Path) -> None:
    needs_backend("ssh")
    with hermitcrab.SSHEnvironment(**SSH) as env, pytest.raises(CommandRefused, match="power"):
        env.execute("reboot")


def test_the_command_line_says_so(quiet_home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hermitcrab.cli", "run", "--on", "local", "-q", "echo first; reboot"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (125, "")
    assert "`reboot` would power off" in done.stderr
    shell = subprocess.run(
        [sys.executable, "-m", "hermitcrab.cli", "shell", "--on", "local"],
        input="reboot\necho second\n",
        capture_output=True,
        text=True,
    )
    assert shell.stdout == "second\n"
    assert "`reboot` would power off" in shell.stderr


def test_the_command_line_asks_on_a_terminal(quiet_home: Path) -> None:
    Path("hermitcrab.toml").write_text('[session]\nguard_confirm = ["touch"]\n')
    command = f"{sys.executable} -m hermitcrab.cli run --on local -q 'touch made && echo done'"
    for answer, made in (("n", False), ("y", True)):
        done = subprocess.run(
            ["script", "-qec", command, "/dev/null"], input=f"{answer}\n", capture_output=True, text=True
        )
        assert "Run it? [y/N]" in done.stdout
        assert Path("made").exists() is made
        assert done.returncode == (0 if made else 125)


def test_names_that_are_public() -> None:
    assert issubclass(CommandRefused, hermitcrab.SandboxError)
    assert guard_module.Confirm is not None
