"""Primitives that know nothing of checkpoints."""
