"""A window of torch.profiler: what its handler sees meanwhile, and its event tree, become a `MemoryTrace`."""
