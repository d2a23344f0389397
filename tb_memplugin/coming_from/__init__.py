"""For scripts written for another tool: its names and call shapes, our numbers.

Write `tb_memplugin.coming_from.` before the name of the package that a script imports, and it runs:
`mosaic`, `memory_profiler` (PyTorch Memory Tracing), `gpu_optimizer` (Memory Tracer),
`pytorch_mem_profiler` (PyTorch Memory Profiler) and `pytorch_mem_tracer` (Pytorch Mem Tracer).
"""
