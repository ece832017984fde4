"""A step of a run, and the context in which it runs."""
