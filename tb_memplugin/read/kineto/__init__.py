"""Read Kineto's JSON traces, of any version of PyTorch."""
