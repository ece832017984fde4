"""The steps of a run: what they need, when they run, what they leave."""
