"""Converts a train state to a flat table of leaves and back; pure, without files."""
