"""Wait for results of another process or thread."""

import time


def wait_until(done, within_s=60.0, *, process=None, why=lambda: ""):
    """Return done() once it is true.
    process: must stay alive meanwhile. why() is the message of a failure.
    """
    deadline = time.monotonic() + within_s
    while not (result := done()):
        assert process is None or process.poll() is None, why()
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)
    return result


def text_of(path, process, log):
    """Return the text of a file that the process writes once it is ready."""
    wait_until(path.exists, 120, process=process, why=log.read_text)
    return path.read_text()
