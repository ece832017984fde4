"""The code host. Each module registers its own routes."""
