"""Reading a text of bash without running it: compared with what bash makes of the same words."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hermitcrab.policy.grammar import Command, Scene, read
from hermitcrab.policy.reader import LONGEST
from hermitcrab.policy.words import UNKNOWN

HOME = "/home/somebody"
SCENE = Scene("/work", {"HOME": HOME, "USER": "somebody", "x": "a b", "e": "", "slash": "/"})


def commands(text: str, scene: Scene = SCENE) -> list[Command]:
    return read(text, scene).commands


def words(text: str, scene: Scene = SCENE) -> list[list[str]]:
    return [[word.text for word in command.words] for command in commands(text, scene)]


LETTERS = st.text("abc/.-_+:,", min_size=1, max_size=4)
PIECES = st.one_of(
    LETTERS,
    st.builds("'{}'".format, st.text('ab $\\"\n*{},', max_size=5)),
    st.builds('"{}"'.format, st.text("ab '*{},/\n", max_size=5)),
    st.sampled_from(
        [
            *("$x", "${x}", '"$x"', '"${x}y"', "$e", '"$e"', "${e}", "$missing", '"$missing"', "$slash"),
            *("${x:-d}", "${e:-d e}", "${missing:-$x}", "${missing-d}", "${x:+y}", "${e:+y}", '"${e:-a b}"'),
            *("${x#a}", "${x%b}", "${x##*a}", "${x%% *}", "${missing:=q}", "${x%'b'}"),
            *(r"a\ b", r"\"", r"\\", r"\$x", r"\a", r"$'\x41\n\101\u00e9'", r"$'a\'b'", '"\\$x\\"\\a"'),
            *(
                "{a,b}",
                "{a,}",
                "{a}",
                "{1..3}",
                "{03..1}",
                "{a..c}",
                "{a,{b,c}}",
                "x{a,b}y{c,d}",
                "{a,'b c'}",
            ),
            *("~", "~/q", "$(echo p  q)", '"$(echo p  q)"', "`echo r`", "$(printf '%s-' a b)", "$(pwd)"),
        ]
    ),
)
WORDS = st.lists(st.lists(PIECES, min_size=1, max_size=3).map("".join), min_size=1, max_size=4)
SETTINGS = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def show(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("words") / "show"
    path.write_text("#!/bin/bash\nfor word; do printf '%s\\0' \"$word\"; done\n")
    path.chmod(0o755)
    return path


def in_bash(text: str, show: Path, cwd: Path) -> list[str]:
    variables = {"HOME": HOME, "x": "a b", "e": "", "slash": "/", "LC_ALL": "C.UTF-8"}
    done = subprocess.run(
        ["bash", "--norc", "-f", "-c", f"{show} {text}"],
        env={"PATH": os.environ["PATH"], **variables},
        cwd=cwd,
        capture_output=True,
        check=True,
    )
    return done.stdout.decode(errors="surrogateescape").split("\0")[:-1]


@SETTINGS
@given(WORDS)
def test_words_are_what_bash_makes_of_them(show: Path, tmp_path: Path, parts: list[str]) -> None:
    text = " ".join(parts)
    assume(not re.search("~[a-z_]", text))  # where a user's home is, nobody knows
    assume("``" not in text)  # the parser takes the second for an end, and bash for a beginning
    [command] = [
        command.words[1:]
        for command in commands(f"{show} {text}", SCENE._replace(cwd=str(tmp_path)))
        if command.words[0].text == str(show)
    ]
    if all(word.known for word in command):
        assert [word.text for word in command] == in_bash(text, show, tmp_path)


def test_most_words_are_known(show: Path, tmp_path: Path) -> None:
    """Otherwise the test above would compare nothing."""
    for text in ('a"$x"{b,c} $e ${missing:-$x}', r"~/q $'\x41' \$x `echo r` {1..2}$slash"):
        [command] = [each for each in commands(f"{show} {text}") if each.words[0].text == str(show)]
        assert all(word.known for word in command.words)
        assert [word.text for word in command.words[1:]] == in_bash(text, show, tmp_path)


SHELL_TEXT = st.one_of(
    st.text(max_size=60),
    st.text("(){}[]|&;<>$`\"'\\ \nabc#=!*?~-", max_size=80),
    st.lists(
        st.sampled_from(
            [
                "if",
                "then",
                "fi",
                "while",
                "do",
                "done",
                "case",
                "in",
                "esac",
                ";",
                "&",
                "|",
                "&&",
                "||",
                "(",
                ")",
                "{",
                "}",
                "$(",
                "`",
                "${",
                "<<E",
                "\nE\n",
                "f()",
                "sudo",
                "rm",
                "-rf",
                "/",
                "bash",
                "-c",
                "'",
                '"',
                "eval",
                "xargs",
                "x=1",
                "$x",
                ">",
                "/dev/sda",
                "function",
                "[[",
                "]]",
                "((",
                "))",
                "for",
                "select",
                "coproc",
                "time",
                "!",
            ]
        ),
        max_size=25,
    ).map(" ".join),
)


@settings(max_examples=300, deadline=None)
@given(SHELL_TEXT)
def test_no_text_makes_it_raise(text: str) -> None:
    found = read(text, SCENE)
    size = len(text.encode(errors="surrogateescape"))
    for command in found.commands:
        for word in command.words:
            assert -1 <= word.start <= word.end <= size


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_bytes_that_are_no_text_are_read_too(data: bytes) -> None:
    read(data.decode(errors="surrogateescape"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("r=rm; $r -rf /", [["rm", "-rf", "/"]]),
        ("echo / | xargs rm -rf", [["echo", "/"], ["xargs", "rm", "-rf"], ["rm", "-rf", "/"]]),
        (
            "echo a | xargs -I{} mv {} b",
            [["echo", "a"], ["xargs", "-I{}", "mv", "{}", "b"], ["mv", "a", "b"]],
        ),
        ("sudo -u x env A=1 b", [["sudo", "-u", "x", "env", "A=1", "b"], ["env", "A=1", "b"], ["b"]]),
        ("bash -ec 'a \"$1\"' 0 z", [["bash", "-ec", 'a "$1"', "0", "z"], ["a", "z"]]),
        ("bash <<E\na $x\nE\nb", [["bash"], ["a", "a", "b"], ["b"]]),
        ("cat <<E\na\nE", [["cat"]]),
        ("cat <<'E' | sh\na\nE", [["cat"], ["sh"], ["a"]]),
        ("sh 2>&1 <<< 'a b'", [["sh"], ["a", "b"]]),
        ("f() { a $1; }; f q", [["a", UNKNOWN], ["f", "q"], ["a", "q"]]),
        ("for i in 1 2; do a $i; done", [["a", "1"], ["a", "2"]]),
        ("a=(p q); b ${a[@]} ${a[0]}", [["b", "p", "q", "p"]]),
        ("x=/; unset x; a $x/", [["a", "/"]]),
        ("read v; a $v $w", [["read", "v"], ["a", UNKNOWN]]),
        (". ./f; a $w", [[".", "./f"], ["a", UNKNOWN]]),
        ('a "${w:?}" $RANDOM', [["a", UNKNOWN, UNKNOWN]]),
        ("[[ $(a) = b ]] && ! c", [["a"], ["c"]]),
        ("time a; coproc b; exec c", [["time", "a"], ["a"], ["coproc", "b"], ["b"], ["exec", "c"], ["c"]]),
        ("# a\nb # c", [["b"]]),
        ("command -v a; which a", [["command", "-v", "a"], ["which", "a"]]),
        ("trap 'a b' EXIT", [["trap", "a b", "EXIT"], ["a", "b"]]),
        ("eval 'a; b'", [["eval", "a; b"], ["a"], ["b"]]),
        ("find . -exec a {} \\;", [["find", ".", "-exec", "a", "{}", ";"], ["a", UNKNOWN]]),
        ("case $x in a) b;; *) c;; esac", [["b"], ["c"]]),
        ("su - x -c 'a b'", [["su", "-", "x", "-c", "a b"], ["a", "b"]]),
    ],
)
def test_commands_are_found(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "directory"),
    [
        ("cd / && a", "/"),
        ("cd; a", HOME),
        ("cd sub; a", "/work/sub"),
        ("cd ..; a", "/"),
        ("(cd /); a", "/work"),
        ("cd / | b; a", "/work"),
        ("cd / & a", "/work"),
        ("cd /x || a", "/work"),
        ("cd $(b); a", UNKNOWN),
        ("cd -; a", UNKNOWN),
        ("env -C /etc a", "/etc"),
        ("pushd /x/../y; a", "/y"),
    ],
)
def test_the_directory_is_followed(text: str, directory: str) -> None:
    assert [command.cwd for command in commands(text) if command.name == "a"][-1] == directory


def test_positions_are_those_of_the_text_in_bytes() -> None:
    text = 'é=ü; echo "é $(sudo a)" | sudo b'
    data = text.encode()
    found = [command.words[0] for command in commands(text) if command.name == "sudo"]
    assert [data[word.start : word.end] for word in found] == [b"sudo", b"sudo"]
    assert all(word.start == -1 for command in commands("bash -c 'sudo a'")[1:] for word in command.words)


def test_redirections_name_what_is_written() -> None:
    def written(text: str) -> list[str]:
        return [word.text for command in commands(text) for word in command.writes]

    assert written("a > $x.txt 2>> log < in") == ["a", "b.txt", "log"]
    assert written("> /dev/sda; { a; } &> b") == ["/dev/sda", "b"]
    assert written("cat <<E > out\nE") == ["out"]


@pytest.mark.parametrize(
    ("text", "bomb"),
    [
        (":(){ :|:& };:", True),
        ("bomb() { bomb | bomb & }; bomb", True),
        ("f() { f & f & }; f", True),
        ("function x { x | x; }", True),
        ("a() { b & }; b() { a; }; a", True),
        ("f() { (f); }; f", True),
        ("while true; do a & done", True),
        ("for ((;;)); do a & done", True),
        ("f() { a | b & }; f", False),
        ("f() { f; }", False),
        ("f() { [ $1 = 0 ] && return; f $(($1 - 1)) & }; f 3", False),
        ('walk() { for d in *; do [ -d "$d" ] && (cd "$d" && walk) & done; }', False),
        ("while true; do a & sleep 1; done", False),
        ("while read x; do a & done", False),
    ],
)
def test_fork_bombs_are_known_by_their_shape(text: str, bomb: bool) -> None:
    assert bool(read(text, SCENE).bombs) is bomb


@pytest.mark.parametrize(
    "piece", ["(", "$(", "{", '"$(', "`", "if ", "<<E\n", "((", "a|", "${x:-", ")", "f(){ "]
)
def test_work_is_bounded(piece: str) -> None:
    """Quadratic in any of these would be minutes."""
    began = time.monotonic()
    for size in (500, LONGEST - 10, 1 << 20):
        read("rm " + piece * (size // len(piece)), SCENE, relevant=lambda line: "rm" in line)
    assert time.monotonic() - began < 20


def test_of_a_very_long_text_the_lines_that_matter_are_read() -> None:
    padding = "echo padding\n" * (LONGEST // 8)
    found = read(f"{padding}rm -rf /\n{padding}", SCENE, relevant=lambda line: "rm" in line)
    assert [[word.text for word in command.words] for command in found.commands] == [["rm", "-rf", "/"]]
    inside = f"cat > x <<'E'\n{padding}rm -rf /\nE\nrm y"
    found = read(inside, SCENE, relevant=lambda line: "rm" in line)
    assert [command.words[-1].text for command in found.commands] == ["y"]
