"""Sources: each reads one kind of recording (profile, snapshot, file, ...) and returns a `MemoryTrace`."""
