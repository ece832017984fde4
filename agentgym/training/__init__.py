"""Training loops: the warm start, reinforcement learning, and recipes that learn offline."""
