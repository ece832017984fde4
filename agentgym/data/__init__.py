"""What an agent learns from and is tested on: lists of items, trajectories of others."""
