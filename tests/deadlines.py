"""Every test ends, also one that failed, and one that no signal ends.

pytest-timeout gives up a test's deadline when the test fails, so that a debugger may look at it;
what then takes the test's things apart may wait forever for what the failure left. And its signal
is for Python: a call in C that does not come back is ended with its process.
"""

import faulthandler

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

SLACK_S = 60.0  # after the deadline, for a test that takes itself apart
_SETTINGS = pytest.StashKey()


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item, settings):
    item.stash[_SETTINGS] = settings
    faulthandler.dump_traceback_later(
        settings.timeout + SLACK_S, file=item.config.stash[fault_handler_stderr_fd_key], exit=True
    )


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_cancel_timer():
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node):
    """After pytest-timeout, which cancels it here."""
    if _SETTINGS in node.stash and not node.config.option.usepdb:
        node.ihook.pytest_timeout_set_timer(item=node, settings=node.stash[_SETTINGS])
