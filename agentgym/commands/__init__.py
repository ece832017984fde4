"""What `agentgym COMMAND` does, by what the commands are about."""
