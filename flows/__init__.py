"""Prefect flows: the order of tasks."""

import services  # noqa: F401 - first: it sets variables that Prefect reads when it is imported
