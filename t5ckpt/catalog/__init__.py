"""Which checkpoints exist: locate, list, the index of steps on object stores, summaries, foreign layouts."""
