"""Pages of `agentgym view`: episodes, token by token, and comparisons. They only read the store."""
