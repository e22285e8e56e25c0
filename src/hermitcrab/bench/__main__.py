"""`python -m hermitcrab.bench`."""

import sys

from hermitcrab.bench import main

sys.exit(main())
