"""A running program to a trace: the profiler with the handler, tracers, histories, steps and reports."""
