"""Primitives that are independent of checkpoints: protocols, arguments, keys, byte budget, thread pool, text."""
