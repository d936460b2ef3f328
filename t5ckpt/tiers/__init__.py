"""Two tiers: saves go to a local directory, and are uploaded to the run's storage in the background."""
