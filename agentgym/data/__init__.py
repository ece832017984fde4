"""Training and test data of agents: lists of items, trajectories of others."""
