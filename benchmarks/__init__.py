"""Every figure that we claim, beside its peer, in one run: `make bench`."""
