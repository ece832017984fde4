"""An S3 server for the tests: moto, one request at a time, because moto checks a condition and
writes in two steps.
"""

import sys
import threading
from pathlib import Path

from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    MotoRequestHandler,
    create_backend_app,
)
from werkzeug.serving import make_server

from agentgym.deploy.owned import end_with_owner


def main(port_file: Path, host: str = "127.0.0.1") -> None:
    end_with_owner()
    application, alone = DomainDispatcherApplication(create_backend_app), threading.Lock()

    def one_at_a_time(environ, start_response):
        with alone:
            return application(environ, start_response)

    server = make_server(host, 0, one_at_a_time, threaded=True, request_handler=MotoRequestHandler)
    part = port_file.with_suffix(".part")
    part.write_text(str(server.server_port))
    part.rename(port_file)
    server.serve_forever()


main(Path(sys.argv[1]), *sys.argv[2:])
