"""A live training without a profiler: storages by dispatch on the CPU, the allocator's history on GPUs."""
