"""Primitives that know nothing of checkpoints: protocols, arguments, keys, byte budget, thread pool, text."""
