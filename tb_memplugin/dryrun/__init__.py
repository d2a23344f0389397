"""Run a program on PyTorch's own CUDA code without a GPU: the second engine of estimates (docs/dryrun.md).

`build.py` compiles what stands in for the GPU from `standin/`, `environment.py` puts it below a process,
`program.py` is what runs there, `values.py` what it reads of tensors, and `engine.py` starts it and reports.
"""
