"""Fixtures of tests/projects.py: clones of this repository, and commands in them."""

from tests.flows.deployed import deployed, switched_on  # noqa: F401
from tests.projects import copied, finished, fresh, made_databases, make_clone, pulled  # noqa: F401
