"""`agentgym view`: what the agent did, token by token and step by step, as pages on this machine.

The viewer only reads the store. The index is derived from the store and may be deleted.
"""
