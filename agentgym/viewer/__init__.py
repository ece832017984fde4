"""`agentgym view`: what the agent did, token by token and step by step, as pages of this machine.

The store is the truth and is only read; the index beside it is derived, and may be deleted.
"""
