"""Plans of saves and restores: pure functions that decide what to write and what to read."""
