"""Finds checkpoints: locating, listing, the index of steps on object stores, summaries, foreign layouts."""
