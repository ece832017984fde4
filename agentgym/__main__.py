"""`python -m agentgym`: what `dvc.yaml` runs, independent of where console scripts are
installed.
"""

import sys

from agentgym.cli import main

sys.exit(main())
