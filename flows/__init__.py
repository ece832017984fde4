"""Prefect flows: the order of tasks."""

from agentgym.defaults import set_process_defaults

set_process_defaults()  # before the first import of prefect, which reads its settings once
