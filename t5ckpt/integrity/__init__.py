"""Verifies checkpoints."""
