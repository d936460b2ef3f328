"""Agreement between the processes of a job over JAX's coordination service: barriers, votes, broadcasts."""
