"""Parts of the plans of saves and restores; pure."""
