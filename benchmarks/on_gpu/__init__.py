"""Measurements that need a GPU, as tables for docs/gpu.md; `--device cpu` is a small trial without one."""
