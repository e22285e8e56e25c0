"""scripts/contract-table: what a run of the contract suite comes to, for people."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
ODD = "a_file_of_any_name_can_be_written[\\xfcn\\xef]"
LIMIT = "asking_the_shell_about_itself_reveals_nothing[type_trap]"
REPORT = f"""<testsuites><testsuite>
<testcase name="test_promise[e2b-{ODD}]" />
<testcase name="test_promise[e2b-a_mode_is_kept_or_set]" />
<testcase name="test_promise[docker-plain-a_mode_is_kept_or_set]">
  <skipped type="pytest.xfail" message="no agent" /></testcase>
<testcase name="test_promise[e2b-{LIMIT}]"><skipped type="pytest.xfail" message="bash" /></testcase>
<testcase name="test_promise[e2b-a_link_is_followed]">
  <skipped type="pytest.skip" message="no ln" /></testcase>
<testcase name="test_something_else" />
{{more}}
</testsuite></testsuites>"""


def table(path: Path, more: str = "", *options: str) -> subprocess.CompletedProcess[str]:
    path.write_text(REPORT.format(more=more), encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "contract-table"), str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_it_counts_and_gives_reasons(tmp_path: Path) -> None:
    done = table(tmp_path / "report.xml")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "|  | e2b | docker-plain |"
    assert "| files | 2 + 1 not applicable | 0 + 1 expected to fail |" in lines
    assert "* docker-plain, expected to fail: `a_mode_is_kept_or_set`: no agent" in lines
    assert "* e2b, not applicable: `a_link_is_followed`: no ln" in lines
    assert lines[-1].startswith("* everywhere, expected to fail: 1 cases that bash itself offers no way")


def test_a_failure_is_one(tmp_path: Path) -> None:
    failed = '<testcase name="test_promise[e2b-a_mode_is_kept_or_set]"><failure message="oh" /></testcase>'
    done = table(tmp_path / "report.xml", failed, "--only", "e2b")
    assert done.returncode == 1
    assert "1 FAILED" in done.stdout
    assert "docker-plain" not in done.stdout
    assert table(tmp_path / "report.xml", "", "--only", "modal").returncode == 1
