"""Looking into checkpoints: view, statistics, differences, runs."""
