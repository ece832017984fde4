"""Delivery of a run's metrics to MLflow, from the commits in the store alone."""
