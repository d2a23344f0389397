"""The run on fake tensors: the mode, its ledger, the stand-in for CUDA, and what is corrected."""
