"""`python -m hermitcrab.testing BACKEND`: every case, one line each, for those who have no pytest at hand."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from hermitcrab.environment import Environment
from hermitcrab.testing import CASES, Inapplicable
from hermitcrab.testing.known import LIMITS


def main(backend: str, wanted: str = "") -> int:
    failed = 0

    def opener(**options: Any) -> Environment:
        return Environment(backend, **options)

    for case in CASES.values():
        if wanted not in case.name:
            continue
        verdict = "kept   "
        try:
            case.run(opener)
        except Inapplicable as reason:
            verdict = f"unasked ({reason})"
        except Exception:
            if case.name in LIMITS:
                sys.stdout.write(f"limit   {case.name}: {LIMITS[case.name]}\n")
                continue
            failed += 1
            verdict = "BROKEN "
            sys.stderr.write(traceback.format_exc())
        sys.stdout.write(f"{verdict} {case.name}: {case.promise}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{failed} of {len(CASES)} promises broken\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or ["local"])))
