"""What updates the weights, on one process or many."""
