"""From a train state to a flat table of its leaves, and back; no files."""
