"""Read memory snapshots of all versions of PyTorch. The pickle is read without running code in it."""
