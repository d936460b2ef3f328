"""Uncompressed chunk files of a local checkpoint, read without TensorStore."""
