"""What lies on disk, as pure functions."""
