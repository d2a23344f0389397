"""Training programs as people write them, each with an end of its own, for tests of `estimate -- python`."""
