"""Code that commands share: the terminal, progress bars, this machine."""
