"""Engine and learner in this process, or in actors of a Ray cluster."""
