"""What one step of a run is and sees while it runs."""
