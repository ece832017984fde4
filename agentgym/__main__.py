"""`python -m agentgym`, the `agentgym` command without an installed console script."""

import sys

from agentgym.cli import main

sys.exit(main())
