"""The Python interfaces of other tools, implemented with this package, so that existing scripts run.

In a script, put `tb_memplugin.coming_from.` before the name of the package that it imports:
`mosaic`, `memory_profiler` (PyTorch Memory Tracing), `gpu_optimizer` (Memory Tracer),
`pytorch_mem_profiler` (PyTorch Memory Profiler) and `pytorch_mem_tracer` (Pytorch Mem Tracer).
"""
