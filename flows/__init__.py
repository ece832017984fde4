"""Prefect flows: the order of tasks."""
