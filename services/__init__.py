"""The servers of a project, and what brings its runs back: Prefect, a worker, MLflow."""

from agentgym.defaults import set_process_defaults

# before the first import of prefect, which reads its settings once and makes its folder, but not
# the one above
set_process_defaults()

from agentgym.private import claim_state  # noqa: E402

claim_state()
