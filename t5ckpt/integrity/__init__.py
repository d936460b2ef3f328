"""Verifies and repairs checkpoints."""
