"""`python -m agentgym`, for `dvc.yaml`: it needs no installed console script."""

import sys

from agentgym.cli import main

sys.exit(main())
