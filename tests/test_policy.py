"""Which of the host's variables arrive where: the list of secrets, forwarding, what `local` inherits."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hermitcrab
from hermitcrab import ConfigError, HermitcrabWarning
from hermitcrab.backends.ssh import client_environment
from hermitcrab.config import SessionConfig
from hermitcrab.policy import secret_names
from hermitcrab.policy.environment import EnvFile, Forwarding, inherited, withheld
from hermitcrab.policy.secrets import Patterns, SecretPolicy, is_secret_value
from hermitcrab.testing.inside import read_until, say

pytestmark = pytest.mark.usefixtures("quiet_home")

SECRET_LINES = """
    AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AWS_CONTAINER_CREDENTIALS_FULL_URI
    AZURE_CLIENT_SECRET AZURE_CLIENT_ID GOOGLE_APPLICATION_CREDENTIALS GCP_SERVICE_ACCOUNT_JSON
    OPENAI_API_KEY ANTHROPIC_API_KEY ANTHROPIC_AUTH_TOKEN CLAUDE_CODE_OAUTH_TOKEN GEMINI_API_KEY HF_TOKEN
    GITHUB_TOKEN GH_TOKEN GITHUB_PAT GITLAB_TOKEN CI_JOB_TOKEN NPM_TOKEN npm_config__auth PYPI_PASSWORD
    PGPASSWORD MYSQL_PWD DB_PASS REDISCLI_AUTH SSHPASS LDAP_BIND_PW GPG_PASSPHRASE SENTRY_DSN
    SECRET_KEY_BASE DJANGO_SECRET_KEY STRIPE_KEY DD_APP_KEY SSH_PRIVATE_KEY DEPLOY_KEYS DOCKER_AUTH_CONFIG
    SLACK_WEBHOOK_URL AZURE_STORAGE_CONNECTION_STRING VAULT_TOKEN BW_SESSION OP_SESSION_my TOKEN PASSWORD
    HERMITCRAB_SUDO_PASSWORD HERMITCRAB_ENV my_api_key ACTIONS_ID_TOKEN_REQUEST_URL WALLET_MNEMONIC
    TS_AUTHKEY WG_PRIVATEKEY AUTHORIZATION
"""
HARMLESS_LINES = """
    PATH HOME PWD OLDPWD LANG TERM SHELL USER EDITOR PAGER DISPLAY XAUTHORITY SSH_AUTH_SOCK SSH_ASKPASS
    GIT_ASKPASS KEYBOARD MONKEY KEYTIMEOUT TOKENIZERS_PARALLELISM MAX_TOKENS XDG_SESSION_TYPE DESKTOP_SESSION
    DBUS_SESSION_BUS_ADDRESS GPG_TTY COMPASS PASSENGER_APP_ENV AUTHOR GIT_AUTHOR_NAME AWS_REGION AWS_PROFILE
    OPENAI_BASE_URL ANTHROPIC_MODEL KUBECONFIG DOCKER_HOST PYTHONPATH LD_LIBRARY_PATH HTTP_PROXY NO_PROXY
    HERMITCRAB_AGENT CI GITHUB_REPOSITORY PATTERN COOKIECUTTER_CONFIG PASSWORD_STORE_DIR SECURITYSESSIONID
    AWS_CA_BUNDLE AWS_ENDPOINT_URL_S3
"""


def test_what_looks_like_a_secret_and_what_does_not() -> None:
    policy = SecretPolicy()
    assert [name for name in SECRET_LINES.split() if not policy.is_secret(name, "value")] == []
    assert [name for name in HARMLESS_LINES.split() if policy.is_secret(name, "value")] == []


@pytest.mark.parametrize(
    "value",
    [
        "postgres://me:word@host/db",
        "redis://:word@host:6379/0",
        "Server=db;User Id=me;Password=word;",
        "ghp_" + "a1" * 18,
        "sk-ant-api03-" + "b" * 40,
        "AKIA" + "Q" * 16,
        "eyJhbGciOiJI.eyJzdWIiOiIx.c2ln",
        "-----BEGIN OPENSSH PRIVATE KEY-----\n",
    ],
)
def test_a_value_that_gives_itself_away(value: str) -> None:
    assert SecretPolicy().is_secret("HARMLESS_NAME", value)
    assert not SecretPolicy(harmless=["HARMLESS_*"]).is_secret("HARMLESS_NAME", value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "postgres://host:5432/db",
        "https://me@host/@scope",
        "git@host:a/b",
        "sk-SK",
        "npm_x",
        "a://b:c/d@e",
    ],
)
def test_a_value_that_is_none(value: str) -> None:
    assert not is_secret_value(value)


def test_the_user_has_the_last_word() -> None:
    policy = SecretPolicy(secret=["ACME_*", "*_NOTE"], harmless=["acme_theme", "*_TOKEN_COUNT"])
    assert policy.is_secret("ACME_X")
    assert policy.is_secret("my_note")
    assert not policy.is_secret("ACME_THEME")
    assert not policy.is_secret("MAX_TOKEN_COUNT")
    assert policy.is_secret("GITHUB_TOKEN")


@given(
    st.text("AB_", min_size=1, max_size=4),
    st.sampled_from(["", "*"]),
    st.sampled_from(["", "*"]),
    st.text("ABC_"),
)
def test_patterns_match_as_globs_do(text: str, before: str, after: str, name: str) -> None:
    pattern = before + text + after
    assert Patterns([pattern]).match(name) == fnmatchcase(name, pattern)


def test_the_list_itself_is_well_formed() -> None:
    patterns = [*secret_names.SECRET, *secret_names.HARMLESS]
    assert len(set(patterns)) == len(patterns)
    assert SessionConfig(secret_names=patterns).secret_names == patterns
    for pattern in secret_names.HARMLESS:
        assert Patterns(secret_names.SECRET).match(pattern.strip("*")), f"{pattern} need not be said"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward_env": ["A", "B-C"]}, "forward_env.1: got 'B-C', takes names of variables"),
        ({"forward_env": ["1A"]}, "forward_env.0: got '1A'"),
        ({"forward_env": "TOKEN"}, "forward_env: takes a list"),
        ({"forward_env": ["BASH_VERSION"]}, "which is bash's own"),
        ({"pass_through": [3]}, "pass_through.0: got 3"),
        ({"secret_names": ["A*B"]}, "secret_names.0: got 'A\\*B', takes names of variables, with \\*"),
        ({"harmless_names": [""]}, "harmless_names.0: got ''"),
        ({"env_file": "/nonexistent/.env"}, "env_file: /nonexistent/.env cannot be read"),
        ({"env": {"A": ["x"]}}, "env.A: got a list, takes a string, a number or a boolean"),
        ({"env": {"A": None}}, "env.A: got nothing"),
    ],
)
def test_wrong_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        hermitcrab.open("local", **options)


def test_the_names_come_from_files_and_variables_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "work" / "hermitcrab.toml").write_text(
        '[session]\nenv_file = ".env"\nforward_env = ["FROM_FILE"]\n'
        "[backends.local]\nenv = { N = 1, T = true }\n"
    )
    (tmp_path / "work" / ".env").write_text("FROM_FILE=one\n")
    with hermitcrab.open("local") as env:
        assert say(env, "echo $FROM_FILE $N $T") == "one 1 true"
    monkeypatch.setenv("HERMITCRAB_FORWARD_ENV", '["OTHER"]')
    monkeypatch.setenv("OTHER", "two")
    with hermitcrab.open("local") as env:
        assert say(env, "echo ${FROM_FILE-none} $OTHER") == "none two"


class TestEnvFile:
    """A `.env` is asked again when it changed, and only then."""

    def test_it_is_read_as_people_write_it(self, tmp_path: Path) -> None:
        path = tmp_path / ".env"
        path.write_bytes(b"\xef\xbb\xbf# note\nexport A='x y' # why\nB=\"l1\\nl2\"\nBARE\nC=${A}!\nD=\xff\n")
        assert EnvFile(path).values() == {"A": "x y", "B": "l1\nl2", "C": "x y!", "D": "\udcff"}

    def test_a_change_counts_at_once_and_a_missing_file_gives_nothing(self, tmp_path: Path) -> None:
        path = tmp_path / ".env"
        path.write_text("A=1\n")
        file = EnvFile(path)
        first = file.values()
        assert first == {"A": "1"}
        assert file.values() is first
        other = tmp_path / "other"
        other.write_text("A=2\n")
        os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
        other.replace(path)
        assert file.values() == {"A": "2"}
        path.write_bytes(b"A=\0")
        assert file.values() == {}
        path.unlink()
        assert file.values() == {}


class TestForwarding:
    """The injected layer, as a value."""

    def test_where_a_name_is_looked_up(self, tmp_path: Path) -> None:
        path = tmp_path / ".env"
        path.write_text("A=file\nB=file\nUNNAMED=file\n")
        config = SessionConfig(
            forward_env=("A", "B", "C", "D"), env={"B": "own", "C": "own", "E": "own"}, env_file=path
        )
        forwarding = Forwarding(config, {"A": "host", "D": "", "UNNAMED": "host"})
        assert forwarding.values() == {"A": "host", "B": "file", "C": "own", "D": ""}
        assert forwarding.names == {"A", "B", "C", "D"}
        path.unlink()
        assert forwarding.values() == {"A": "host", "B": "own", "C": "own", "D": ""}

    def test_a_tool_does_not_get_a_secret_unless_the_user_named_it(self) -> None:
        host = {"TOOL_HOME": "/t", "TOOL_TOKEN": "t", "TOOL_URL": "x://a:b@c", "TOOL_KEY": "k"}
        asked = ("TOOL_HOME", "TOOL_TOKEN", "TOOL_URL", "TOOL_KEY")
        config = SessionConfig(pass_through=asked, forward_env=("TOOL_KEY",))
        with pytest.warns(HermitcrabWarning, match="looks like a secret") as said:
            forwarding = Forwarding(config, host)
        assert [str(each.message).split()[1] for each in said] == ["TOOL_TOKEN", "TOOL_URL"]
        assert forwarding.values() == {"TOOL_KEY": "k", "TOOL_HOME": "/t"}
        allowed = SessionConfig(pass_through=asked, harmless_names=("TOOL_*",))
        assert Forwarding(allowed, host).values() == host

    def test_a_value_that_becomes_a_secret_is_not_passed_on(self) -> None:
        host = {"TOOL_URL": "https://host"}
        forwarding = Forwarding(SessionConfig(pass_through=("TOOL_URL",)), host)
        assert forwarding.values() == host
        host["TOOL_URL"] = "https://me:word@host"
        assert forwarding.values() == {}

    def test_without_names_nothing_is_asked(self) -> None:
        forwarding = Forwarding(SessionConfig())
        assert forwarding.values() is forwarding.values()
        assert not forwarding.names


def test_what_local_inherits(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_text("DEBUG=1\nLANG=C\n")
    host = {"PATH": "/bin", "A_TOKEN": "t", "MY_TOKEN": "m", "DEBUG": "1", "LANG": "de", "ACME_X": "x"}
    config = SessionConfig(env_file=path, secret_names=("ACME_*",), harmless_names=("MY_TOKEN",))
    assert inherited(config, host) == {"PATH": "/bin", "MY_TOKEN": "m", "LANG": "de"}
    assert withheld(config, host) == ["ACME_X", "A_TOKEN", "DEBUG"]


@pytest.mark.parametrize("agent", ["c", "python"])
def test_a_local_agent_has_no_secrets(agent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERMITCRAB_AGENT", agent)
    monkeypatch.setenv("SOME_API_KEY", "s3cret-value")
    monkeypatch.setenv("PLAIN_SETTING", "plain")
    monkeypatch.setenv("NAMED_TOKEN", "named-value")
    with hermitcrab.open("local", forward_env=["NAMED_TOKEN"]) as env:
        assert say(env, "echo ${SOME_API_KEY-none} $PLAIN_SETTING $NAMED_TOKEN") == "none plain named-value"
        parent = "sed 's/.*) . //; s/ .*//' /proc/$PPID/stat"
        agent_pid = int(say(env, parent))
        assert agent_pid != os.getpid()
        supervisor = say(env, "tr '\\0' '\\n' </proc/$PPID/environ").encode()
        for environ in (supervisor, Path(f"/proc/{agent_pid}/environ").read_bytes()):
            assert b"PLAIN_SETTING=plain" in environ
            assert b"s3cret" not in environ
            assert b"named-value" not in environ


def test_a_state_that_knows_a_forwarded_name_forgets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with hermitcrab.open("local") as first:
        say(first, "export HC_NAME=captured OTHER=1")
        state = first.state
    with hermitcrab.open("local", state=state, forward_env=["HC_NAME"]) as env:
        assert "HC_NAME" not in env.state.variables
        assert say(env, "echo ${HC_NAME-none} $OTHER") == "none 1"
        monkeypatch.setenv("HC_NAME", "host")
        running = env.start("echo $HC_NAME; sleep 100")
        assert read_until(running, "host\n") == "host\n"
        running.kill()
        assert "HC_NAME" not in env.state.to_json()


def test_the_locale_is_not_sent_to_a_remote_host() -> None:
    host = {"LANG": "de_DE", "LANGUAGE": "de", "LC_ALL": "C", "HOME": "/h", "SSH_AUTH_SOCK": "/s"}
    assert client_environment(host) == {"HOME": "/h", "SSH_AUTH_SOCK": "/s"}
