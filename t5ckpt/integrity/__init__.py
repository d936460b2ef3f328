"""Whether a checkpoint is whole (verify), and what can be rebuilt (repair)."""
