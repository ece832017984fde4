"""The numbers of a run in MLflow, delivered from committed steps alone."""
