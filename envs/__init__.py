"""Environment servers: FastAPI and one simulator each. Nothing here imports torch or agentgym."""
