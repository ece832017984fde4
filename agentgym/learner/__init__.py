"""The learner, which updates the weights, on one process or many."""
