"""What kernels allocate beside their results.

The row of an operator is in the file of its family: `losses`, `sorting`, `reductions` and so on. If all that
it takes is a copy of what it reads, as for softmax, layer norm, pooling and upsampling, it is in `copies`; if
fake tensors get its result wrong, in `results`. `workspaces` says when cuBLAS takes one, and
`GpuSpec.cublas_workspace_bytes` how large it is.
"""
