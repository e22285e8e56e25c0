"""`python -m hermitcrab.cli`"""

import sys

from hermitcrab.cli import main

sys.exit(main())
