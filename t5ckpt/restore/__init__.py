"""One restore: what it is asked for, and what it says."""
