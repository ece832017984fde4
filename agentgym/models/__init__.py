"""Models: their forward, their tokens and conversations, their checkpoints."""
