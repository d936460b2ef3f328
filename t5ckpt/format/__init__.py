"""The format on disk, as pure functions: names, manifest, array specs, sidecar, file checksums, chunk grid."""
