"""Run a program on PyTorch's own CUDA code without a GPU: the second engine of estimates (docs/dryrun.md).

`build.py` compiles what stands in for the GPU from `standin/`, `engine.py` puts it below a process, starts
that and reports, `program.py` is what runs there, and `values.py` what it reads of tensors.
"""
