"""Every test ends, also after a failure, and also if it ignores signals.

pytest-timeout drops a test's deadline when the test fails, so that a debugger can inspect it; the
teardown may then wait forever. Its signal only reaches Python: if a call in C does not return, the
process must be killed.
"""

import faulthandler

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

SLACK_S = 60.0  # after the deadline, for a test that fails and tears down
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
    """Set the deadline again: pytest-timeout has canceled it before this hook."""
    if _SETTINGS in node.stash and not node.config.option.usepdb:
        node.ihook.pytest_timeout_set_timer(item=node, settings=node.stash[_SETTINGS])
