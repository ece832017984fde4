"""Comparisons of many runs: their description, their results and the presentation."""
