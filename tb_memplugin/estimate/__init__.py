"""Estimate the memory of a run without a GPU: the model runs on fake tensors, the allocator is simulated.

`answer/` is what is asked and answered (start with `estimator.py` there), `run/` the run on fake tensors,
`kernels/` what kernels allocate, `program/` what makes a program run, `libraries/` other libraries, and
`ranks/` jobs of several ranks.
"""
