"""Fixtures of tests/projects.py: clones of this repository, and commands in them."""

from tests.flows.deployed import deployed, switched_on  # noqa: F401
from tests.projects import (  # noqa: F401
    copied,
    finished,
    fresh,
    made_databases,
    make_clone,
    pulled,
)
