"""Servers of a project, and recovery of its runs: Prefect, a worker, MLflow."""

from agentgym.defaults import set_process_defaults

# before the first import of prefect, which reads its settings once and creates its folder, but not
# the parent folder
set_process_defaults()

from agentgym.private import claim_state  # noqa: E402

claim_state()
