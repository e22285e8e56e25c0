"""The benchmark measures what it says it does. How fast that is, is no test."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hermitcrab.bench import machine, main, peers, process, program, report, stats, timing, worker
from hermitcrab.bench.peer_drivers.places import docker_rows, ssh_rows
from hermitcrab.bench.rows import (
    Goal,
    Report,
    Row,
    at_least,
    beside_peers,
    report_from_json,
    report_to_json,
    times_faster,
)
from hermitcrab.bench.stats import Summary
from tests.conftest import required
from tests.engines import APPTAINER, ENGINES, IMAGE, SSH

NOWHERE = {"image": None, "ssh": None, "ssh_config": None}
SOURCE = Path(__file__).parent.parent / "src"
NAMES = {
    "execute-true",
    "execute-cd",
    "execute-export",
    "execute-functions",
    "execute-thinking",
    "start",
    "cleanup",
    "output",
    "crowd",
    "idle-memory",
    "idle-start",
    "bubblewrap-true",
    "bubblewrap-start",
    "bubblewrap-cleanup",
    "bubblewrap-snapshot",
    "bubblewrap-restore",
    "bubblewrap-move",
    "bubblewrap-fork",
    "gateway-local-exec",
    "gateway-local-execute",
    "gateway-local-crowd",
    "gateway-local-create",
    "gateway-local-warm",
    "gateway-records",
    "import",
    "run-true",
}
MAY_BE_MISSING = {name for name in NAMES if name.startswith("bubblewrap")}
PLACES = {
    "docker": ({"docker-true", "docker-start", "docker-cleanup"}, ["--image", IMAGE]),
    "docker-crowd": ({"docker-crowd"}, ["--image", IMAGE]),
    "docker-snapshots": ({"docker-snapshot", "docker-restore"}, ["--image", IMAGE]),
    "docker-moves": ({"docker-move", "docker-fork"}, ["--image", IMAGE]),
    "docker-files": ({"docker-upload", "docker-download"}, ["--image", IMAGE]),
    "docker-sync": ({"docker-sync-first", "docker-sync-unchanged"}, ["--image", IMAGE]),
    "gateway-docker": (
        {f"gateway-docker-{each}" for each in ("exec", "execute", "crowd", "create", "warm")},
        ["--image", IMAGE],
    ),
    "podman": ({"podman-true"}, ["--image", IMAGE]),
    "gvisor": ({"gvisor-true"}, ["--image", IMAGE]),
    "apptainer": ({"apptainer-true"}, ["--apptainer-image", APPTAINER["image"]]),
    "ssh": (
        {"ssh-true", "ssh-start"},
        ["--ssh", str(SSH["host"]), "--ssh-config", os.path.relpath(str(SSH["config_file"]))],
    ),
    "ssh-sync": (
        {"ssh-sync-first", "ssh-sync-unchanged"},
        ["--ssh", str(SSH["host"]), "--ssh-config", os.path.relpath(str(SSH["config_file"]))],
    ),
}
"""Measurements of containers and hosts: their rows, and the options that say where."""
IN_PLACES = {name for names, _ in PLACES.values() for name in names}


@pytest.mark.slow
def test_every_row_is_measured_beside_its_lower_bound(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    argv = ["--quick", "--scale", "0.05", "--no-peers", "--json", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "hermitcrab.bench", *argv],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(file.read_text())
    assert data["machine"].keys() >= {"cpu", "cores", "system", "python", "bash"}
    rows = {row["name"]: row for row in data["rows"]}
    assert rows.keys() >= NAMES - MAY_BE_MISSING | IN_PLACES
    for name, row in rows.items():
        assert row["title"] in done.stdout
        if name in IN_PLACES:
            assert row["reason"].startswith("needs --")
            continue
        if name in MAY_BE_MISSING and row["reason"]:
            continue
        assert not row["reason"], f"{name}: {row['reason']}"
        for contender in (row["ours"], row["raw"]):
            assert contender["n"] > 0
            # A handful of sessions may fit into memory that was there before.
            assert contender["median"] >= 0 if row["unit"] == "KiB" else contender["median"] > 0, name
    assert "[1/" in done.stderr, "progress goes to stderr"


def test_only_one_measurement_and_json_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--scale", "0.005", "--only", "execute-true", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["name"] == "execute-true"
    assert row["ratio"] == pytest.approx(row["ours"]["median"] / row["raw"]["median"])


LONG = {"docker-moves", "docker-snapshots", "gateway-docker"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [pytest.param(name, marks=[pytest.mark.thorough] if name in LONG else []) for name in PLACES]
)
def test_containers_and_hosts_are_measured_beside_their_own_exec(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{ENGINES / 'apptainer' / 'bin'}:{os.environ['PATH']}")
    names, options = PLACES[place]
    status = main(["--scale", "0.01", "--only", place, "--json", *options])
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    missing = ", ".join({row["reason"] for row in rows.values()})
    if missing and place.partition("-")[0] not in required():
        pytest.skip(missing)
    assert (status, missing) == (0, "")
    assert rows.keys() == names
    for row in rows.values():
        assert row["ours"]["median"] > 0
        assert row["raw"]["median"] > 0


def test_an_engine_that_does_not_answer_is_a_row_that_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing")
    assert main(["--only", "docker-crowd", "--image", "any", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["name"], row["ours"], row["failed"]) == ("docker-crowd", None, False)
    assert "ocker" in row["reason"]


def test_a_benchmark_that_is_ended_lets_its_worker_close_what_it_opened(tmp_path: Path) -> None:
    (tmp_path / "opening.py").write_text(
        "import pathlib, time\n"
        "def wait(at):\n"
        "    try:\n"
        "        pathlib.Path(at, 'opened').touch()\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        pathlib.Path(at, 'opened').rename(pathlib.Path(at, 'closed'))\n"
    )
    text = (
        "from hermitcrab.bench import program, worker\n"
        "with program.terminated_as_interrupted():\n"
        f"    worker.call('opening:wait', {{'at': {str(tmp_path)!r}}}, timeout=60)\n"
    )
    path = {"PYTHONPATH": f"{SOURCE}:{tmp_path}"}
    argv, env = [sys.executable, "-c", text], {**os.environ, **path}
    with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as running:
        while not (tmp_path / "opened").exists():
            assert running.poll() is None
            time.sleep(0.01)
        running.terminate()
    assert running.returncode != 0
    assert (tmp_path / "closed").exists()


@pytest.mark.slow
def test_a_peer_is_measured_in_containers() -> None:
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode != 0:
        assert "docker" not in required()
        pytest.skip("scripts/engines/docker up was not run")
    opened: list[ToyShell] = []

    def open_shell() -> ToyShell:
        opened.append(ToyShell())
        return opened[-1]

    rows = list(docker_rows("toy 1", open_shell, IMAGE, 0.01))
    assert [(row.name, row.who, row.reason) for row in rows] == [
        ("docker-true", "toy 1", ""),
        ("docker-start", "toy 1", ""),
        ("docker-crowd", "toy 1", ""),
    ]
    assert opened
    assert all(shell.closed for shell in opened)


def test_a_peer_that_does_not_open_is_rows_with_the_reason() -> None:
    def refuse() -> ToyShell:
        raise OSError("no server\nin the image")

    rows = list(ssh_rows("toy 1", refuse, "nowhere.invalid", None, 0.01))
    assert {(row.name, row.reason) for row in rows} == {
        ("ssh-true", "OSError: no server in the image"),
        ("ssh-start", "OSError: no server in the image"),
    }


class ToyShell:
    """A peer that does nothing."""

    closed = False

    def run(self, command: str) -> str:
        assert not self.closed
        return ""

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("argv", [["--only", "nothing"], ["--scale", "0"], ["--scale", "-1"]])
def test_wrong_options_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_a_measurement_that_fails_is_a_row_with_the_reason_and_an_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = program.Measurement("nowhere:nothing", "cannot be measured")
    monkeypatch.setitem(program.MEASUREMENTS, "start", broken)
    assert main(["--only", "start", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert "nowhere" in row["reason"]


def test_a_peer_that_does_not_install_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(peer: str, say: object) -> Path:
        raise peers.CannotInstall("does not install: no such thing")

    monkeypatch.setattr(peers, "install", refuse)
    (row,) = peers.measure("swe-rex", 1.0, NOWHERE, lambda line: None)
    assert (row.who, row.ours, row.reason) == ("swe-rex", None, "does not install: no such thing")


def test_a_peer_that_does_not_work_is_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "install", lambda peer, say: Path(sys.executable))
    (row,) = peers.measure("no-such-peer", 1.0, NOWHERE, lambda line: None)
    assert "no_such_peer" in row.reason


def test_the_end_of_what_pip_says_is_the_reason() -> None:
    said = (
        "WARNING: slow\nERROR: could not find a version\nERROR: No matching distribution found\nhint: none\n"
    )
    assert peers.reason(said) == "No matching distribution found"
    assert peers.reason("it broke\n") == "it broke"
    assert peers.reason("") == "pip did not say why"


def test_peers_live_in_the_cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path in peers.home("swe-rex").parents


@pytest.mark.parametrize(
    ("samples", "percent", "expected"),
    [([5.0], 95, 5.0), ([3.0, 1.0, 2.0], 50, 2.0), ([1.0, 2.0], 50, 1.5), ([1.0, 2.0, 3.0], 0, 1.0)],
)
def test_percentile(samples: list[float], percent: float, expected: float) -> None:
    assert stats.percentile(samples, percent) == expected


def test_percentile_of_many_lies_between_samples() -> None:
    assert stats.percentile([float(n) for n in range(101)], 95) == 95
    assert stats.percentile([0.0, 10.0], 95) == pytest.approx(9.5)


@pytest.mark.parametrize(("samples", "percent"), [([], 50), ([1.0], 101), ([1.0], -1)])
def test_percentile_of_nothing(samples: list[float], percent: float) -> None:
    with pytest.raises(ValueError, match=r"samples|percentile"):
        stats.percentile(samples, percent)


def test_a_summary_names_the_bad_end() -> None:
    samples = [float(n) for n in range(101)]
    assert stats.summarize(samples, factor=1000) == Summary(n=101, median=50_000, p95=95_000)
    assert stats.summarize(samples, higher_is_better=True).p95 == 5


def test_ratio() -> None:
    two, four = Summary(1, 2.0, 2.0), Summary(1, 4.0, 4.0)
    assert stats.ratio(four, two) == 2
    assert stats.ratio(four, None) is None
    assert stats.ratio(four, Summary(1, 0.0, 0.0)) is None


def test_counts_are_scaled_but_never_to_nothing() -> None:
    assert [stats.scaled(400, scale) for scale in (1, 0.1, 0.0001)] == [400, 40, 2]


def test_contenders_take_turns_in_blocks_and_the_first_one_changes() -> None:
    calls: list[str] = []
    samples = timing.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4, block=2)
    assert "".join(calls).endswith("aabbbbaa")
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 4, "b": 4}


def test_past_its_budget_a_measurement_stops() -> None:
    assert len(timing.interleaved({"a": lambda: None}, 100, block=5, budget=0)["a"]) == 5


def test_lives_take_turns_and_their_first_is_not_counted() -> None:
    calls: list[str] = []

    def life(name: str) -> timing.Life:
        def begin() -> str:
            calls.append(f"{name}+")
            return name

        return timing.Life(begin, lambda begun: calls.append(f"{begun}-"))

    begins, ends = timing.lives({"a": life("a"), "b": life("b")}, 2, rest=0)
    assert " ".join(calls) == "a+ a- b+ b- b+ b- a+ a- a+ a- b+ b-"
    for seconds in (begins, ends):
        assert {name: len(taken) for name, taken in seconds.items()} == {"a": 2, "b": 2}


def test_past_their_budget_lives_stop_after_one_that_counts() -> None:
    begins, _ = timing.lives({"a": timing.Life(lambda: None)}, 100, budget=0, rest=0)
    assert len(begins["a"]) == 1


def test_those_that_opened_are_closed_when_one_does_not() -> None:
    numbers = itertools.count()
    closed: list[int] = []

    def open_one() -> int:
        if (number := next(numbers)) == 2:
            raise OSError("the third does not open")
        return number

    with pytest.raises(OSError, match="third"), timing.all_open(open_one, closed.append, 4):
        pytest.fail("not all of them opened")
    assert {0, 1} <= set(closed)
    assert 2 not in closed


def test_a_swarm_runs_everything_and_passes_errors_on() -> None:
    calls: list[int] = []
    assert timing.swarm([lambda: calls.append(1), lambda: calls.append(2)], 3) > 0
    assert sorted(calls) == [1, 1, 1, 2, 2, 2]
    with pytest.raises(ZeroDivisionError):
        timing.swarm([lambda: 1 / 0, lambda: None], 1)


def test_a_worker_answers_whatever_is_printed_meanwhile() -> None:
    assert worker.call("json:loads", {"s": "[1]"}, timeout=60) == [1]
    with pytest.raises(worker.WorkerFailed, match="ModuleNotFoundError"):
        worker.call("nowhere:nothing", {}, timeout=60)
    with pytest.raises(worker.WorkerFailed, match="longer than"):
        worker.call("time:sleep", {}, timeout=0.001)


ROWS = (
    Row(
        name="execute-true",
        title='execute("true")',
        unit="ms",
        ours=Summary(400, 1.5, 2.0),
        raw=Summary(400, 2.0, 3.0),
        raw_title="a bash",
        goals=(Goal("at most 1.25x", True), Goal("at most 0.5x", False)),
        details={"threads": 1.0},
    ),
    Row(
        name="output",
        title="output",
        unit="MiB/s",
        ours=Summary(7, 300.0, 200.0),
        raw=Summary(7, 1200.0, 900.0),
        higher_is_better=True,
    ),
    Row(name="execute-true", title='execute("true")', unit="ms", who="peer | 1", reason="does not install"),
)
REPORT = Report(version="1", when="today", scale=1.0, machine={"cpu": "a crab", "cores": "2"}, rows=ROWS)


def test_goals_against_raw_and_for_rates() -> None:
    assert times_faster(0.04, 25) == Goal("at least 25 times faster", True)
    assert not times_faster(0.05, 25).met
    assert not times_faster(None, 25).met
    assert at_least(300, 300, "commands/s") == Goal("at least 300 commands/s", True)
    assert not at_least(299, 300, "commands/s").met


@pytest.mark.parametrize(("median", "met"), [(2.5, True), (2.6, False)])
def test_the_goal_against_a_peer_counts_its_fastest_way(median: float, met: bool) -> None:
    def row(who: str, median: float) -> Row:
        return Row(name="docker-true", title="", unit="ms", who=who, ours=Summary(1, median, median))

    ours, *theirs = beside_peers(
        [row("hermitcrab", median), row("swe-rex 1 a", 9.0), row("swe-rex 1 b", 5.0)]
    )
    assert ours.goals == (Goal("at least 2 times as fast as swe-rex", met),)
    assert not any(each.goals for each in theirs)


def test_a_peer_that_was_not_measured_is_no_goal() -> None:
    rows = (Row(name="docker-true", title="", unit="ms", ours=Summary(1, 1.0, 1.0)), *ROWS)
    assert beside_peers(rows) == rows


def test_a_report_survives_json() -> None:
    assert report_from_json(json.loads(report.as_json(REPORT))) == REPORT
    assert report_to_json(REPORT)["rows"][0]["ratio"] == 0.75


def test_the_table_shows_every_row_and_peers_under_ours() -> None:
    lines = report.as_table(REPORT).splitlines()
    assert "cpu: a crab" in lines
    first = next(at for at, line in enumerate(lines) if line.startswith('execute("true")'))
    ours, peer, output = lines[first : first + 3]
    figures = "hermitcrab ms 1.50 2.00 2.00 3.00 0.75x 400 at most 1.25x: met; at most 0.5x: MISSED"
    assert " ".join(ours.split()[1:]) == figures
    assert "peer | 1" in peer
    assert "not measured" in peer
    assert "25%" in output
    assert any("does not install" in line for line in lines)
    assert any("threads: 1.00" in line for line in lines)


def test_a_shorter_run_says_so() -> None:
    shorter = Report(version="1", when="today", scale=0.1, machine={}, rows=())
    assert "0.1 of the full length" in report.as_table(shorter)
    assert "full length" not in report.as_table(REPORT)


def test_markdown_goes_between_the_markers() -> None:
    block = report.as_markdown(REPORT)
    document = f"# Title\n\n{report.BEGIN}\nold figures\n{report.END}\n\nThe rest.\n"
    written = report.insert(document, block)
    assert "old figures" not in written
    assert written.startswith(f"# Title\n\n{report.BEGIN}\nMeasured")
    assert written.endswith("-->\n\nThe rest.\n")
    assert report.insert(written, block) == written
    assert "peer \\| 1" in block
    with pytest.raises(ValueError, match="no pair of lines"):
        report.insert("nothing here", block)


def test_the_readme_has_the_markers() -> None:
    readme = (SOURCE.parent / "README.md").read_text()
    assert report.as_markdown(REPORT) in report.insert(readme, report.as_markdown(REPORT))


def test_a_report_can_be_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, readme = tmp_path / "saved.json", tmp_path / "README.md"
    saved.write_text(report.as_json(REPORT))
    readme.write_text(f"before\n{report.BEGIN}\n{report.END}\nafter\n")
    assert main(["--from", str(saved), "--markdown", str(readme)]) == 0
    assert "a crab" in readme.read_text()
    assert "measured" in capsys.readouterr().out


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.123, "0.12"), (12.34, "12.3"), (1234.5, "1234")])
def test_numbers_have_about_three_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_the_machine_is_read_from_what_linux_says() -> None:
    assert (
        machine.cpu_model("processor\t: 0\nmodel name\t: Crab 9000\nmodel name\t: Crab 9000\n") == "Crab 9000"
    )
    assert machine.cpu_model("") == ""
    assert machine.memory("MemTotal:       24683520 kB\n") == "23.5 GiB"


def test_proc_is_read_whatever_a_program_is_called() -> None:
    assert process.parent_of("12 (a) b (c)) S 7 12 12 0 -1") == 7
    assert process.field_kib("Name:\tx\nVmHWM:\t  123 kB\n", "VmHWM") == 123
    assert process.field_kib("", "VmHWM") == 0
