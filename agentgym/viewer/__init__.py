"""`agentgym view`: what the agent did, token by token, as pages. It only reads the store."""
