"""Measure every performance figure that the documentation claims, next to a peer's: `make bench`."""
