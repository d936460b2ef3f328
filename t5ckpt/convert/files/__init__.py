"""Files of other programs, read and written array by array."""
