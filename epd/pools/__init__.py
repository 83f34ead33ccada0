"""Worker pools: who is alive, and who gets the next piece of work."""
