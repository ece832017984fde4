"""Prefect flows: the order of tasks."""

import services  # noqa: F401 - first of all: what Prefect reads when it is imported is set there
