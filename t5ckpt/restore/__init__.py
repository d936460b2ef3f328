"""One restore: request, resolve, read into the buffers of shards, put on devices."""
