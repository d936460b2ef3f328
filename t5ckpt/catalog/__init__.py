"""Which checkpoints there are, and in which layout each one is."""
