"""Train states and their leaves; no files."""
