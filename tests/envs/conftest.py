"""A server process that several test files share."""

import pytest

from tests.envs.raw import started


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yield a default server on loopback, without a token."""
    with started(tmp_path_factory.mktemp("server"), "--drain-timeout", "0.1") as found:
        yield found
