"""Thin Prefect tasks: retries, a timeout and an artifact around one library call each."""

import services  # noqa: F401 - first: it sets variables that Prefect reads when it is imported
