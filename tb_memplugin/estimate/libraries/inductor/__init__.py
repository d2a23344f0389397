"""What Inductor, the default compiler of `torch.compile`, allocates: its own code, run on fake tensors."""
