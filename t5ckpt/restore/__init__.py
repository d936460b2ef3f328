"""Restores: the request, the checkpoint that it resolves to, reading into shard buffers, putting these on devices."""
