"""The contract suite: what every sandbox owes to the session that runs in it, one case per promise.

`CASES` holds them by name; `CASES[name].run(opener)` asks one of a fresh sandbox. `for_pytest` makes
parameters of them, `python -m hermitcrab.testing BACKEND` asks them all, and `mutants` proves that the suite
notices. See docs/contract-suite.md.
"""

from hermitcrab.testing import cases as _cases  # registers them
from hermitcrab.testing.suite import CASES, Case, Inapplicable, Opener, case, each

__all__ = ["CASES", "Case", "Inapplicable", "Opener", "case", "each"]
del _cases
