"""Commands of `agentgym`, one module for each subject."""
