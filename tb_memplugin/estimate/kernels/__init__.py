"""What kernels allocate beside their results."""
