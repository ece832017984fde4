"""Thin Prefect tasks: retries, a timeout and an artifact around one library call each."""

from agentgym.defaults import set_process_defaults

set_process_defaults()
