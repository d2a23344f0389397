"""Whether a program that we record is the program that runs without us: see `harness` and `programs`."""
