"""A running program to a trace: the profiler with the handler, tracers, histories, steps and reports."""

import sys
from importlib import import_module

if "tb_memplugin.launch.start" in sys.modules:
    import_module("torch")  # then `tb-memplugin run` begins, and no module of ours may be half imported
