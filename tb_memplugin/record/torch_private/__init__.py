"""Every private name of torch that this package uses; no other file names one.

Each file here has the names of one part of torch, and importing it looks them up once, so that a caller pays
nothing per call. A row says in which versions of torch the name is, what it is for, and what happens without
it (`table.py`).

`python -m tb_memplugin.record.torch_private` prints the table for the installed torch.
"""
