"""Reads uncompressed chunk files of a local checkpoint without TensorStore."""
