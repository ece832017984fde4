"""The code host. Its routes are registered by the modules that hold them."""
