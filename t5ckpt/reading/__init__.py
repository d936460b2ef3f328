"""From a located checkpoint to its arrays, verified, by index."""
