"""From a located checkpoint to its arrays."""
