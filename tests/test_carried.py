"""Credentials, skills and caches: what is refused, what is left behind, how it gets into a sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import hermitcrab
from hermitcrab import ConfigError, HermitcrabWarning
from hermitcrab.backends.docker.config import DockerConfig
from hermitcrab.backends.docker.flags import Host, Image, Person, home_inside, run_flags
from hermitcrab.backends.volumes import Mount
from hermitcrab.cli import main
from hermitcrab.config import resolve
from hermitcrab.core.protocols import Traits
from hermitcrab.errors import UnsupportedCapability
from hermitcrab.policy.carriage import Carriage
from hermitcrab.policy.carried import CarriedItem, plan
from hermitcrab.testing.inside import say
from tests import engines
from tests.sshd import HOST, Sshd
from tests.test_contract import needs_backend
from tests.test_ssh import needs_sshd

pytestmark = pytest.mark.usefixtures("quiet_home")


@pytest.fixture
def home(quiet_home: Path) -> Path:
    (quiet_home / ".netrc").write_text("machine host\n")
    (quiet_home / ".config/tool").mkdir(parents=True)
    (quiet_home / ".config/tool/token").write_text("t0ken\n")
    return quiet_home


def planned(**settings: Any) -> list[CarriedItem]:
    return plan(resolve("local", settings, cwd=Path.cwd(), environ=os.environ).session)


def names(items: list[CarriedItem]) -> dict[str, str]:
    return {item.name: item.left_behind for item in items}


class TestPlan:
    """What becomes of each declaration."""

    def test_where_everything_is(self, home: Path, tmp_path: Path) -> None:
        (tmp_path / "skills/deploy").mkdir(parents=True)
        (tmp_path / "wheels").mkdir()
        found = planned(
            credentials=[".netrc", "./.config//tool/token", ".netrc"],
            skills=[tmp_path / "skills/deploy"],
            caches=[tmp_path / "wheels"],
        )
        assert [(each.kind, each.name, each.source, each.path) for each in found] == [
            ("credential", ".netrc", home / ".netrc", "~/.netrc"),
            ("credential", ".config/tool/token", home / ".config/tool/token", "~/.config/tool/token"),
            ("skill", "skills/deploy", tmp_path / "skills/deploy", "~/.hermitcrab/skills/deploy"),
            ("cache", "caches/wheels", tmp_path / "wheels", "~/.hermitcrab/caches/wheels"),
        ]

    @pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "~/.netrc", "", ".", "a\nb", 3])
    def test_what_is_no_file_of_the_home(self, path: Any) -> None:
        with pytest.raises(ConfigError, match=r"credentials.0: got "):
            planned(credentials=[path])

    def test_links(self, home: Path, tmp_path: Path) -> None:
        (tmp_path / "outside").write_text("x")
        (home / "inside").symlink_to(home / ".netrc")
        (home / "out").symlink_to(tmp_path / "outside")
        (home / "up").symlink_to("..")
        (home / "loop").symlink_to("loop")
        (home / "dangling").symlink_to("nothing")
        assert planned(credentials=["inside"])[0].source == home / ".netrc"
        for name in ("out", "up/outside"):
            with pytest.raises(ConfigError, match=f"{name} cannot be carried: it leads out of"):
                planned(credentials=[name])
        with pytest.raises(ConfigError, match="loop cannot be carried: it cannot be followed"):
            planned(credentials=["loop"])
        assert names(planned(credentials=["dangling"])) == {"dangling": "missing"}

    def test_a_home_of_its_own(self, home: Path, tmp_path: Path) -> None:
        (tmp_path / "linked").symlink_to(home)
        found = planned(credentials=[".netrc"], credential_home=tmp_path / "linked")
        assert found[0].source == home / ".netrc"

    def test_what_is_no_file(self, home: Path) -> None:
        os.mkfifo(home / "pipe")
        for name in (".config", "pipe"):
            with pytest.raises(ConfigError, match=f"{name} cannot be carried: it is no file"):
                planned(credentials=[name])
        with pytest.raises(ConfigError, match=r"the skill .* it is no directory"):
            planned(skills=[home / ".netrc"])
        with pytest.raises(ConfigError, match=r"the cache / cannot be carried: it has no name"):
            planned(caches=["/"])
        with pytest.raises(ConfigError, match=r"the cache /proc/1 cannot be carried"):
            planned(caches=["/proc/1"])

    def test_its_own_secrets_never_travel(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stores = [
            ".config/hermitcrab/hermitcrab.toml",
            ".local/state/hermitcrab/store.db",
            ".env",
            "set.toml",
        ]
        for store in stores:
            (home / store).parent.mkdir(parents=True, exist_ok=True)
            (home / store).write_text("")
        monkeypatch.setenv("HERMITCRAB_CONFIG", str(home / "set.toml"))
        (home / "another-name").hardlink_to(home / ".env")
        for name in (*stores, "another-name"):
            with pytest.raises(ConfigError, match="hermitcrab keeps secrets of its own"):
                planned(credentials=[name], env_file=home / ".env")
        for tree in (home, home / ".config", home / ".local/state/hermitcrab"):
            with pytest.raises(ConfigError, match="hermitcrab keeps secrets of its own"):
                planned(skills=[tree])
        assert len(planned(credentials=[".netrc"], env_file=home / ".env")) == 1

    def test_two_of_one_name(self, tmp_path: Path) -> None:
        for parent in ("a", "b"):
            (tmp_path / parent / "same").mkdir(parents=True)
        with pytest.raises(ConfigError, match="there are two named skills/same"):
            planned(skills=[tmp_path / "a/same", tmp_path / "b/same"])
        assert len(planned(skills=[tmp_path / "a/same"], caches=[tmp_path / "b/same"])) == 2

    def test_each_can_be_switched_off(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HERMITCRAB_CARRY_OFF", '[".netrc"]')
        both = [".netrc", ".config/tool/token"]
        assert names(planned(credentials=both)) == {".netrc": "switched off", ".config/tool/token": ""}
        with pytest.warns(HermitcrabWarning, match=r"nothing is named 'netrc'; there is \.netrc, \.config"):
            planned(credentials=both, carry_off=["netrc"])
        assert planned() == []


def test_the_command_line_lists_what_is_carried_and_what_is_withheld(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HERMITCRAB_CREDENTIALS", '[".netrc", ".pgpass", ".config/tool/token"]')
    monkeypatch.setenv("HERMITCRAB_CARRY_OFF", '[".netrc"]')
    monkeypatch.setenv("SOME_API_KEY", "s3cret")
    assert main(["config", "--on", "local"]) == 0
    said = capsys.readouterr().out
    rows = {line.split()[0]: line for line in said.splitlines() if line.startswith(".")}
    assert rows[".netrc"].endswith("switched off")
    assert rows[".pgpass"].endswith("missing")
    assert rows[".config/tool/token"].endswith("~/.config/tool/token  carried")
    assert "SOME_API_KEY" in said
    assert "s3cret" not in said
    assert main(["config", "--on", "bubblewrap", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [each["state"] for each in told["carried"]] == ["switched off", "missing", "carried"]
    assert told["withheld"] == []


class TestCarriage:
    """How it gets into a kind of sandbox."""

    def resolved(self, carries: str, **settings: Any) -> Any:
        found = resolve("local", settings, cwd=Path.cwd(), environ=os.environ)
        traits = Traits(isolated=True, network="own", carries=carries)
        return replace(found, backend=replace(found.backend, traits=traits))

    def test_where_nothing_can_be_given(self, home: Path) -> None:
        with pytest.raises(UnsupportedCapability, match=r"neither mount nor be given \.netrc; leave"):
            Carriage.of(self.resolved("nothing", credentials=[".netrc"]))
        off = self.resolved("nothing", credentials=[".netrc"], carry_off=[".netrc"])
        assert Carriage.of(off).mounts == []

    def test_what_is_missing_is_told_and_left_out(self, home: Path) -> None:
        with pytest.warns(HermitcrabWarning, match=rf"the credential {home}/\.pgpass is missing"):
            carriage = Carriage.of(self.resolved("mounts", credentials=[".pgpass", ".netrc"]))
        assert carriage.mounts == [(f"{home}/.netrc", "~/.netrc")]

    def test_on_this_machine_it_is_there_already(self, home: Path) -> None:
        with hermitcrab.open("local", credentials=[".netrc"]) as env:
            (item,) = env.carried()
            assert (item.path, item.how) == (str(home / ".netrc"), "same file")

    def test_a_remote_engine_mounts_nothing(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
        with pytest.raises(UnsupportedCapability, match="this engine runs elsewhere"):
            hermitcrab.open("docker", image=engines.IMAGE, credentials=[".netrc"])

    def test_a_container_of_another_user(self, home: Path) -> None:
        needs_backend("docker")
        options: dict[str, Any] = {
            "image": engines.IMAGE,
            "network": False,
            "credentials": [".config/tool/token"],
        }
        with hermitcrab.open("docker", user="1234:1234", **options) as env:
            assert say(env, "cat ~/.config/tool/token; touch ~/.config/mine ~/.config/tool/mine") == "t0ken"
        (home / ".config/tool/token").chmod(0o600)
        with pytest.warns(
            HermitcrabWarning, match="/root/.config/tool/token: the sandbox's user may not read"
        ):
            hermitcrab.open("docker", user="1234:1234", **options).cleanup()


def test_the_home_in_a_container() -> None:
    host, someone = Host(uid=7, gid=7), {"me": Person(5, 5, "/home/me")}
    config = DockerConfig(image="i")
    assert home_inside(config, host, Image()) == "/root"
    assert home_inside(config, host, Image(home="/srv")) == "/srv"
    assert home_inside(config, host, Image(user="me", people=someone)) == "/home/me"
    assert home_inside(replace(config, run_as_host_user=True), host, Image(home="/srv")) == "/root"
    token = Mount("/h/token", "/home/me/.config/tool/token", True)
    flags = run_flags(config, host, Image(user="me", people=someone), [token])
    made = [each.partition(":")[0] for each in flags if each.startswith("/home/me")]
    assert made == ["/home/me", "/home/me/.config/tool", "/home/me/.config"]
    assert all("uid=5,gid=5" in each for each in flags if each.startswith("/home/me"))
    assert flags[flags.index("--mount") + 1].endswith(",readonly")


@pytest.fixture
def server(tmp_path: Path, home: Path) -> Iterator[Sshd]:
    with Sshd(tmp_path / "sshd", "AcceptEnv LANG LC_*") as started:
        yield started


@needs_sshd
class TestCopies:
    """Over ssh nothing is mounted."""

    def opened(self, server: Sshd, **options: Any) -> hermitcrab.Environment:
        config = server.config_file
        return hermitcrab.open(
            "ssh", host=HOST, config_file=config, credentials=[".config/tool/token"], **options
        )

    def test_they_are_private_and_taken_away(self, server: Sshd, home: Path) -> None:
        with self.opened(server) as first:
            said = say(first, "cat ~/.config/tool/token; stat -c %a ~/.hermitcrab ~/.hermitcrab/session-*")
            assert said == "t0ken\n700\n700"
            with self.opened(server) as second:
                assert say(second, "cat ~/.config/tool/token") == "t0ken"
            # The second one took its own away, and not the first one's.
            assert say(first, "cat ~/.config/tool/token") == "t0ken"
        assert not [path for path in server.files() if "token" in path or "hermitcrab" in path]

    def test_they_are_renewed_and_revoked(self, server: Sshd, home: Path, tmp_path: Path) -> None:
        (tmp_path / "files").mkdir()
        (tmp_path / "files/a").write_text("a")
        with self.opened(server, sync=[f"{tmp_path / 'files'}:~/files"]) as env:
            copies = env._async._carriage.copies
            assert copies is not None
            copies._sync._interval = 0.0  # five seconds are a long time for a test
            (home / ".config/tool/token").write_text("renewed\n")
            assert say(env, "cat ~/.config/tool/token ~/files/a") == "renewed\na"
            (home / ".config/tool/token").unlink()
            assert env.execute("cat ~/.config/tool/token").returncode == 1

    def test_a_file_of_the_remote_is_kept(self, server: Sshd, home: Path) -> None:
        with hermitcrab.open("ssh", host=HOST, config_file=server.config_file) as env:
            say(env, "mkdir -p ~/.config/tool; echo theirs >~/.config/tool/token")
        with pytest.warns(HermitcrabWarning, match="has one of its own, which is left as it is"):
            env = self.opened(server)
        with env:
            assert say(env, "cat ~/.config/tool/token") == "theirs"
            assert env.carried()[0].left_behind == "the sandbox has its own"
            assert say(env, "cat ~/.hermitcrab/session-*/.config/tool/token 2>/dev/null; echo") == ""
        with hermitcrab.open("ssh", host=HOST, config_file=server.config_file) as env:
            assert say(env, "cat ~/.config/tool/token") == "theirs"

    def test_no_variable_is_sent_that_nobody_named(
        self, server: Sshd, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        server.config_file.write_text(server.client_config(HOST, "SendEnv LANG LC_*"))
        monkeypatch.setenv("LC_HC_TEST", "sent")
        with self.opened(server, forward_env=["LC_HC_NAMED"]) as env:
            monkeypatch.setenv("LC_HC_NAMED", "named")
            assert say(env, "echo ${LC_HC_TEST-none} $LC_HC_NAMED") == "none named"
