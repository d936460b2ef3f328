"""Finds checkpoints: locating, listing, summaries, foreign layouts."""
