"""Code shared by commands: how they end, progress bars, and checks of this machine."""
