"""Inspects checkpoints without restoring them: view, statistics, differences, runs."""
