"""The steps of a run: their inputs, their order and their results."""
