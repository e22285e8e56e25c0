import sys

from hermitcrab.agent.fallback import main

sys.exit(main())
