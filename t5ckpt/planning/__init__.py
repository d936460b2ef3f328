"""What to write and what to read, decided before a byte moves; pure."""
