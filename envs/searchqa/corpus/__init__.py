"""The embedded corpus: an invented world, its passages and the questions they answer."""
