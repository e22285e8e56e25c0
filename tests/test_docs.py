"""Every Python example in the documentation runs, in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hermitcrab.cli import docs

ROOT = Path(__file__).parent.parent
PAGES = (
    "README.md",
    "docs/usage.md",
    "docs/plugins.md",
    "docs/bubblewrap.md",
    "docs/contract-suite.md",
    "docs/guard.md",
    "docs/security.md",
    "docs/sudo.md",
    "docs/files.md",
    "docs/gateway-client.md",
    "docs/sync.md",
    "docs/moving.md",
    "docs/sessions.md",
    "docs/snapshots.md",
    "docs/environment-policy.md",
    "docs/credentials.md",
)


def examples() -> list[tuple[str, str]]:
    return [
        (f"{page}:{text.count(chr(10), 0, match.start()) + 1}", match[1])
        for page in PAGES
        for text in [(ROOT / page).read_text(encoding="utf-8")]
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    ]


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in examples()])
def test_an_example_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_there_are_examples() -> None:
    assert len(examples()) >= 10


def test_the_table_of_backends_is_current() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert docs.filled(text, "backends", docs.backends_table(docs.BUILT_IN)) == text, "run `make docs`"
