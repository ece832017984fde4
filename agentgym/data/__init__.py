"""Training and test data of agents: lists of items, and trajectories that other agents recorded."""
