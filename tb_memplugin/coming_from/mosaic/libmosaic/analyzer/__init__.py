"""A snapshot, read and analysed."""
