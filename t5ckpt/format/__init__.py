"""The format on disk, as pure functions: names, manifest, array specs, facts, file checksums, chunk grid."""
