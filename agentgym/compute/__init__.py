"""Where engine and learner live: this process, or actors of a Ray cluster."""
