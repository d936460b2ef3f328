"""Reads a located checkpoint: its contents, and its arrays by index, with checksums verified."""
