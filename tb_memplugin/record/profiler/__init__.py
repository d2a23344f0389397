"""Make a `MemoryTrace` from a torch.profiler window: its event tree and the handler's own record."""
