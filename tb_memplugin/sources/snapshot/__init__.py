"""Memory snapshots, of any era: the pickle is read without running anything in it."""
