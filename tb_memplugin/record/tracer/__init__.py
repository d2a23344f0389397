"""Trace a running model without a profiler: by a dispatch mode on the CPU, by allocator history on GPUs."""
