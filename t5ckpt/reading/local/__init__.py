"""Reads chunk files of a local checkpoint without TensorStore: uncompressed and blosc chunks."""
