"""Sources: each reads something foreign and yields a `MemoryTrace`."""
