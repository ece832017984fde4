"""Pages of `agentgym view` behind our gate, as a process of `make up`: they show the runs of the
project's own parameter file.
"""

from __future__ import annotations

import os
import socket
import sys

from services.proxy import Gate, serve
from services.state import project_config

LOGIN = "AGENTGYM_VIEWER_LOGIN"  # environment variable: user:password


def main(descriptor: int) -> None:
    """Serve the pages on the socket `descriptor` until SIGTERM, or until the owner is gone."""
    from agentgym.viewer.app import make_app
    from agentgym.viewer.guard import LOOPBACK, Guard
    from agentgym.viewer.viewer import Viewer

    bound = socket.socket(fileno=descriptor)
    with Viewer.open(project_config()) as viewer:
        guarded = Guard(make_app(viewer), LOOPBACK, bound.getsockname()[1])
        gate = Gate(guarded, os.environ.pop(LOGIN), open_paths=("/healthz",), sockets=False)
        serve(gate, bound)


if __name__ == "__main__":
    main(int(sys.argv[1]))
